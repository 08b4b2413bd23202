//! The CNI plugin `flannel`.

fn main() -> std::process::ExitCode {
    flannel_cni::main()
}
