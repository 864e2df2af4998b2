"""`python -m benchmarks.overload.neighbour`: one who keeps a core busy, until it is killed."""

if __name__ == "__main__":
    while True:
        pass
