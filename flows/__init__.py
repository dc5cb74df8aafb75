"""What runs after what: one flow a file, and the command line ``dflashctl``."""
