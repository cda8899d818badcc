"""httpx, twice on one connection."""

import os

import httpx

with httpx.Client(headers={"Authorization": f"Bearer {os.environ['API_KEY']}"}) as client:
    for _ in range(2):
        response = client.get(os.environ["TARGET_URL"] + "/echo")
        print(response.raise_for_status().status_code, response.headers, response.text)
