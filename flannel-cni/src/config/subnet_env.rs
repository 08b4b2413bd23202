//! The file `subnet.env` of this host.

use std::fmt::Display;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use flannel_core::SubnetEnv;

use crate::spec::error::{Code, Error, Result};

/// Reads the file.
///
/// # Errors
/// [`Code::TRY_AGAIN_LATER`] if the file does not exist, [`Code::IO`] or [`Code::DECODING`].
pub(crate) fn read(path: &Path) -> Result<SubnetEnv> {
    let failed = |code, why: &dyn Display| {
        let path = path.display();
        let advice = "Check the flannel pod log for this node.";
        Error::new(
            code,
            format!("failed to load flannel 'subnet.env' file: {path}: {why}. {advice}"),
        )
    };
    let text = fs::read_to_string(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => failed(
            Code::TRY_AGAIN_LATER,
            &"no such file or directory: flanneld writes it when it has a subnet",
        ),
        ErrorKind::InvalidData => failed(Code::DECODING, &error),
        _ => failed(Code::IO, &error),
    })?;
    let env = SubnetEnv::parse(&text).map_err(|why| failed(Code::DECODING, &why))?;
    let missing = env.missing();
    if missing.is_empty() {
        return Ok(env);
    }
    Err(failed(Code::DECODING, &format!("it is missing {}", missing.join(", "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_file_has_the_code_to_try_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("subnet.env");
        let error = read(&path).unwrap_err();
        assert!(
            error.code == Code::TRY_AGAIN_LATER && error.msg.contains(path.to_str().unwrap()),
            "{error}"
        );
        fs::write(&path, b"\xff").unwrap();
        assert_eq!(read(&path).unwrap_err().code, Code::DECODING);
        for (text, why) in [
            ("FLANNEL_MTU=x", r#"line 1: FLANNEL_MTU is "x", expected a number of bytes"#),
            ("FLANNEL_MTU=1\nFLANNEL_SUBNET=10.1.5.1/24", "it is missing FLANNEL_NETWORK, "),
            (
                "FLANNEL_SUBNET=10.1.5.1/24\nFLANNEL_MTU=1\nFLANNEL_IPMASQ=true",
                "it is missing FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK. Check",
            ),
        ] {
            fs::write(&path, text).unwrap();
            let error = read(&path).unwrap_err();
            assert!(error.code == Code::DECODING && error.msg.contains(why), "{error}");
        }
        assert_eq!(read(dir.path()).unwrap_err().code, Code::IO);
    }
}
