complete -r launch
unset -f _launch_complete
