"""`python -m coatcheck`: the same as the `coatcheck` command."""

from coatcheck.cli import main

if __name__ == "__main__":
    main()
