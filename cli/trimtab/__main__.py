"""The `trimtab` command. It imports lazily: the processes of replicas import this module too."""

import sys


def main() -> None:
    """Run the command line; exit with 2 for a user's error, with 1 for a failure."""
    try:
        from trimtab.app import run  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.stderr.write("trimtab: interrupted\n")
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
