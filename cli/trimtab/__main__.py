"""The `trimtab` command. Nothing is imported before it is needed: replicas are forked through this module too."""

import sys


def main() -> None:
    """Run the command line; exit with 2 and one clear message for what the user got wrong, 1 for what failed."""
    try:
        from trimtab.app import run  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.stderr.write("trimtab: interrupted\n")
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
