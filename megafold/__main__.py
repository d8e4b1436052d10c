"""`python -m megafold`: the same as the console script."""

from megafold.cli import main

if __name__ == "__main__":
    main()
