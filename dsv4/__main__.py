from dsv4.commands.cli import main

main()
