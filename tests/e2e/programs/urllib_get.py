"""The standard library alone."""

import os
import urllib.request

request = urllib.request.Request(
    os.environ["TARGET_URL"] + "/echo", headers={"Authorization": f"Bearer {os.environ['API_KEY']}"}
)
with urllib.request.urlopen(request, timeout=20) as response:
    print(response.status, response.headers, response.read().decode())
