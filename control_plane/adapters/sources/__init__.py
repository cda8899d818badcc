"""Where secrets are read from (`ports.SourceReader`): one module a kind.

    file          below one root on our own disk                 kubernetes    Secrets, over the API, as our own pod
    vault         HashiCorp Vault's KV engines 1 and 2, `hvac`   secrets_manager   AWS, `boto3`
    asking        threads for libraries that block, and their way to the one outbound client
    auth_files    files that hold what we show to a source

Rule: whatever a source says stays in here. Out of it go a value or a `SourceError` in our own words.
"""
