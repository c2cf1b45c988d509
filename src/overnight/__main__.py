"""``python -m overnight`` is the command line."""

from overnight.cli import main

if __name__ == "__main__":
    main()  # type: ignore[no-untyped-call]  # without annotations, so that old Pythons can parse it
