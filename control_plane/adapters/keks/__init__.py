"""Key-encryption keys that never leave where they are kept (`ports.KekProvider`): AWS KMS, Vault transit."""
