"""The running system: scheduler, pools, health, engines, node daemon, HTTP server, sweeps."""
