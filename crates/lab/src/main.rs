//! `lab`: a real Kubernetes on this machine.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
