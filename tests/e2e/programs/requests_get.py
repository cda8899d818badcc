"""requests, twice in one session."""

import os

import requests

with requests.Session() as session:
    for _ in range(2):
        response = session.get(
            os.environ["TARGET_URL"] + "/echo",
            headers={"Authorization": f"Bearer {os.environ['API_KEY']}"},
            timeout=20,
        )
        response.raise_for_status()
        print(response.status_code, response.headers, response.text)
