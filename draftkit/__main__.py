"""`python -m draftkit`, the form that launchers such as `accelerate launch -m draftkit` start."""

from draftkit.cli import main

if __name__ == "__main__":
    main()
