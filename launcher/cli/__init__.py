"""The command line of `launch`: one file for each verb, and what they share."""
