"""Where does clipping help, and how can one tell? See --help, and `microclip_lab.evidence`."""

from microclip_lab.evidence.command import main

if __name__ == "__main__":
    main()
