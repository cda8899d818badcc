"""Providers that mint values (`ports.Provider`), one protocol a module. All ask through the outbound client.

| module           | what it speaks                                                                    |
|------------------|-----------------------------------------------------------------------------------|
| `token_endpoint` | a token endpoint's answers and refusals (RFC 6749 §5), for those below             |
| `oauth`          | refresh token, client credentials, JWT bearer                                      |
| `google`         | a service account's access and ID tokens                                           |
| `github`         | an app's installation tokens                                                       |
| `aws`            | AssumeRole                                                                         |
| `table`          | which kind is minted by which                                                      |
"""
