"""``python -m mrlhf``, also under torchrun, srun and mpirun."""

from mrlhf.cli import main

if __name__ == "__main__":
    main()
