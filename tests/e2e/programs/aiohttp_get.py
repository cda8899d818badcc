"""aiohttp; it reads the proxy from the environment only when it is told to trust it."""

import asyncio
import os

import aiohttp


async def main() -> None:
    async with aiohttp.ClientSession(trust_env=True) as session:
        headers = {"Authorization": f"Bearer {os.environ['API_KEY']}"}
        async with session.get(os.environ["TARGET_URL"] + "/echo", headers=headers) as response:
            response.raise_for_status()
            print(response.status, response.headers, await response.text())


asyncio.run(main())
