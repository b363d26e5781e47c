"""The verbs of `launch`: what shows, follows or ends something, and starts no job."""
