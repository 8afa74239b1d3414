//! `lab`: a real Kubernetes cluster on this machine.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
