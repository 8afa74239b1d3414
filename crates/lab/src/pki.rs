//! The certificates and kubeconfigs of a lab. Made once, in the lab's directory.

use std::{
    fs,
    net::IpAddr,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType,
};
use serde_json::json;

/// The directory with everything in it.
#[derive(Clone, Debug)]
pub struct Pki {
    dir: PathBuf,
}

/// Who a certificate speaks for.
pub struct Subject<'a> {
    pub user: &'a str,
    pub group: Option<&'a str>,
    pub names: &'a [&'a str],
    pub addresses: &'a [IpAddr],
}

impl Pki {
    pub fn at(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Makes the authorities and the key that signs tokens, unless they are there.
    pub fn authorities(&self) -> Result<()> {
        fs::create_dir_all(&self.dir).with_context(|| format!("make {}", self.dir.display()))?;
        for name in ["ca", "front-proxy-ca"] {
            if self.dir.join(format!("{name}.crt")).exists() {
                continue;
            }
            let key = KeyPair::generate().context("make a key")?;
            let mut params = CertificateParams::default();
            params.distinguished_name = distinguished(name, None);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
            let certificate = params.self_signed(&key).with_context(|| format!("sign {name}"))?;
            self.write(&format!("{name}.key"), &key.serialize_pem())?;
            self.write(&format!("{name}.crt"), &certificate.pem())?;
        }
        if !self.dir.join("sa.pub").exists() {
            let key = KeyPair::generate().context("make a key")?;
            self.write("sa.key", &key.serialize_pem())?;
            self.write("sa.pub", &key.public_key_pem())?;
        }
        Ok(())
    }

    /// Makes `<file>.crt` and `<file>.key` signed by an authority, unless they are there.
    pub fn certificate(&self, authority: &str, file: &str, subject: &Subject<'_>) -> Result<()> {
        if self.dir.join(format!("{file}.crt")).exists() {
            return Ok(());
        }
        let read =
            |name: String| fs::read_to_string(self.dir.join(&name)).with_context(|| format!("read {name}"));
        let ca_key =
            KeyPair::from_pem(&read(format!("{authority}.key"))?).context("read the authority's key")?;
        let issuer = Issuer::from_ca_cert_pem(&read(format!("{authority}.crt"))?, ca_key)
            .context("read the authority's certificate")?;
        let names: Vec<String> = subject.names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names).context("name the certificate")?;
        params.subject_alt_names.extend(subject.addresses.iter().map(|a| SanType::IpAddress(*a)));
        params.distinguished_name = distinguished(subject.user, subject.group);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().context("make a key")?;
        let certificate = params.signed_by(&key, &issuer).with_context(|| format!("sign {file}"))?;
        // The certificate last: it is what says that the pair is complete.
        self.write(&format!("{file}.key"), &key.serialize_pem())?;
        self.write(&format!("{file}.crt"), &certificate.pem())
    }

    /// A kubeconfig that carries its certificates, so that it can be used from anywhere.
    pub fn kubeconfig(&self, file: &str, server: &str) -> Result<String> {
        let base64 = |name: String| -> Result<String> {
            let bytes = fs::read(self.dir.join(&name)).with_context(|| format!("read {name}"))?;
            Ok(k8s_openapi::ByteString(bytes)).map(|b| json!(b).as_str().unwrap_or_default().to_owned())
        };
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": {
                "server": server, "certificate-authority-data": base64("ca.crt".into())?,
            }}],
            "users": [{"name": file, "user": {
                "client-certificate-data": base64(format!("{file}.crt"))?,
                "client-key-data": base64(format!("{file}.key"))?,
            }}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": file}}],
            "current-context": "lab",
        });
        serde_json::to_string_pretty(&config).context("write the kubeconfig")
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        write_secret(&self.dir.join(name), text)
    }
}

/// Writes a file that only root can read, whole or not at all.
pub fn write_secret(path: &Path, text: &str) -> Result<()> {
    use std::io::Write as _;
    let partial = path.with_extension("partial");
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&partial)
        .with_context(|| format!("make {}", partial.display()))?;
    file.write_all(text.as_bytes()).with_context(|| format!("write {}", partial.display()))?;
    fs::rename(&partial, path).with_context(|| format!("put {} in place", path.display()))
}

fn distinguished(user: &str, group: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, user);
    if let Some(group) = group {
        name.push(DnType::OrganizationName, group);
    }
    name
}
