"""The whole path, with separate processes and with clients nobody here wrote."""
