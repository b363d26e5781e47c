complete -e -c launch
functions -e _launch_complete
