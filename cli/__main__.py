"""`python -m mycelia.cli` is the `mycelia` command."""

from mycelia.cli.main import main

if __name__ == "__main__":
    main()
