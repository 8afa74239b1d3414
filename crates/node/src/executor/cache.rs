//! The result cache, in the layout of libcni, and files with device information.
//!
//! The journal of the daemon is authoritative; other programs read these files.

use std::{
    fs,
    io::{self, ErrorKind, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use api::network_status::DeviceInfo;
use k8s_openapi::ByteString;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, value::RawValue};

use super::CniRequest;

/// The longest file that is read.
const MAX_FILE: u64 = 1024 * 1024;
const KIND: &str = "cniCacheV1";

/// A file of the result cache.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CachedResult<'a> {
    kind: &'static str,
    container_id: &'a str,
    config: ByteString,
    if_name: &'a str,
    network_name: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    netns: &'a str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    cni_args: &'a [(String, String)],
    #[serde(skip_serializing_if = "Map::is_empty")]
    capability_args: &'a Map<String, Value>,
    result: &'a RawValue,
    /// The NAD. Only results of this executor have the key: the container runtime writes its own into the same directory.
    #[serde(rename = "patchbay.dev/network")]
    nad: &'a str,
}

/// What is read of a file of the result cache.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct StoredResult {
    kind: String,
    container_id: String,
    if_name: String,
    result: Box<RawValue>,
}

/// The file of an attachment. The request was checked, so its parts have no `/`.
pub fn result_path(dir: &Path, request: &CniRequest) -> PathBuf {
    dir.join(format!("{}-{}-{}", request.config.name, request.container_id, request.ifname))
}

/// The content of the file of an attachment.
pub fn render(
    request: &CniRequest,
    capability_args: &Map<String, Value>,
    result: &str,
) -> io::Result<Vec<u8>> {
    let result: &RawValue = serde_json::from_str(result)?;
    let cached = CachedResult {
        kind: KIND,
        container_id: &request.container_id,
        config: ByteString(request.config.text().as_bytes().to_vec()),
        if_name: &request.ifname,
        network_name: &request.config.name,
        netns: request.netns.as_deref().unwrap_or_default(),
        cni_args: &request.cni_args,
        capability_args,
        result,
        nad: &request.nad,
    };
    Ok(serde_json::to_vec(&cached)?)
}

/// Writes a file, so that a reader sees all of it or nothing.
pub fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(ErrorKind::InvalidInput.into());
    };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    // The name of a network does not start with a dot.
    let temporary = dir.join(format!(".{}.tmp", name.to_string_lossy()));
    let write = || {
        let mut options = fs::File::options();
        let mut file = options.create(true).truncate(true).write(true).mode(0o600).open(&temporary)?;
        file.write_all(content)?;
        fs::rename(&temporary, path)
    };
    write().inspect_err(|_| drop(fs::remove_file(&temporary)))
}

/// The result in the file of an attachment, if there is one.
pub fn read_result(path: &Path, container_id: &str, ifname: &str) -> Option<String> {
    let stored: StoredResult = serde_json::from_slice(&read(path).ok()?).ok()?;
    let matches = stored.kind == KIND && stored.container_id == container_id && stored.if_name == ifname;
    matches.then(|| stored.result.get().to_owned())
}

/// The path that Multus gives to a plugin for information about the device of an attachment. Only attachments with a
/// device have one.
pub fn device_info_path(dir: &Path, request: &CniRequest) -> Option<PathBuf> {
    request.capability_args.get("deviceID").and_then(Value::as_str).filter(|id| !id.is_empty())?;
    let (nad, id, ifname) = (&request.nad, &request.container_id, &request.ifname);
    Some(dir.join(format!("{nad}-{id}_{ifname}").replace('/', "-")))
}

/// The information that a plugin wrote about its device, if it did.
pub fn read_device_info(path: &Path) -> io::Result<Option<DeviceInfo>> {
    match read(path) {
        Ok(content) => Ok(Some(serde_json::from_slice(&content)?)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes a file that may not exist.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    // A pipe in the place of the file must not block.
    let file = fs::File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
    let mut content = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_FILE {
        return Err(ErrorKind::FileTooLarge.into());
    }
    Ok(content)
}
