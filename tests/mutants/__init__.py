"""Security tests, and the one-line changes that must turn them red.

| module   | what it does                                                                                    |
|----------|-------------------------------------------------------------------------------------------------|
| `guards` | what `@pytest.mark.guards(path, old, new)` says, read off collected tests                       |
| `plugin` | collects them while pytest collects tests                                                      |
| `tree`   | a copy of the project that imports nothing from the original                                    |
| `run`    | `make mutants`: for each guard, make the change in a copy, run its test, expect it to fail      |

A test that stays green when its check is taken out of the product guards nothing.
"""
