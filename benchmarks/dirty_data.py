"""What helps on dirty data? See --help, and `microclip_lab.dirty_data`."""

from microclip_lab.dirty_data.command import main

if __name__ == "__main__":
    main()
