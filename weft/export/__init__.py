"""Plans and schedules as settings and files of other tools, and orders read from them."""
