"""The `trimtab` command. Nothing is imported before it is needed: replicas are forked through this module too."""

import sys


def main() -> None:
    """Run the command line; exit with 2 and one clear message for what the user got wrong, 1 for what failed."""
    from trimtab.commands import run  # noqa: PLC0415

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
