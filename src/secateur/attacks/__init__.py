"""What an attacker does with what it sees."""
