"""The corpus of attacks on credential proxies, as a kit that runs against any of them. See README.md.

| module      | what it holds                                                                          |
|-------------|----------------------------------------------------------------------------------------|
| `ways`      | one way through a proxy (listener, placement, placeholder), and what its origin saw     |
| `attack`    | what an attack is, and the verdicts: refused, carried as text, nothing comes back       |
| `hosts`     | the host, spelled, split, contradicted; addresses that must not be dialled              |
| `places`    | the placeholder where it does not belong, altered, encoded, doubled, or off its host    |
| `framing`   | requests and replies that two readers could read in two ways                            |
| `callers`   | who asks, proven wrongly or not at all                                                  |
| `replies`   | the key in what comes back, in every part, form and cut                                 |
| `corpus`    | all of them, and the grid they fill, with the reason for each empty cell                |
"""
