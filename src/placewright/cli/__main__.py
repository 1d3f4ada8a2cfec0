"""``python -m placewright.cli``: the command line without its script."""

from placewright.cli import main

if __name__ == "__main__":
    main()
