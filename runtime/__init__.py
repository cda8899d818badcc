"""The runtime: turns for subjects, carried out with placeholders and never with a key.

A turn walks through these files in this order:

| file                      | what it does                                                                            |
|---------------------------|-----------------------------------------------------------------------------------------|
| `api`                     | `POST /v1/turn`; 401 before anything else is looked at                                  |
| `core/session_token`      | every claim of a session token, checked                                                 |
| `core/subject`            | who acts: the subject rules, one function                                               |
| `runner`                  | one turn in numbered steps                                                              |
| `adapters/control_plane`  | the keys that session tokens are verified with, and the exchange                        |
| `adapters/client_proof`   | by what we prove which client we are                                                    |
| `adapters/session_ends`   | the control plane's side of a session's end                                             |
| `placeholders`            | asked for once, renewed in place while a turn lasts, in this process and nowhere else    |
| `adapters/memory`         | conversations, in this process and nowhere else                                         |
| `endings`                 | sessions that end: told, forgotten, confirmed                                           |
| `adapters/models`         | the call to the model, through the egress proxy                                         |

Beside them: `core/turn` (what a turn is made of), `ports`, `config`, `logs`, `bootstrap` (the wiring, by hand).

What this release holds: synchronous turns, answered as JSON, by one model behind the Messages interface. A conversation
lives in the process that holds it and ends with it or with its session; there are no durable sessions, no runs in the
background and no tools. The runtime asks for placeholders only: a `direct` answer is refused, as is a mode it does not
know. It accepts session tokens only, so a client that may name its subject opens a session at the control plane first.
"""
