//! The controller: desired state, reconcile loop, southbound drivers, northbound API.
