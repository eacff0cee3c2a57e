"""`python -m vitcompress`, and the module that torchrun starts."""

from vitcompress.cli import main

if __name__ == "__main__":
    main()
