compdef -d launch
unfunction _launch_complete
