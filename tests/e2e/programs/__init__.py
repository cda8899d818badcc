"""Small programs as users write them, each run as a process of its own in a clean environment.

Each reads `TARGET_URL` and its key from the environment, talks to the target, and prints all that came back. None of
them knows that there is a proxy: what they use of it is what their library reads from the environment by itself.
"""
