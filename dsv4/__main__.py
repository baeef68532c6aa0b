from dsv4.cli import main

main()
