//! The certificates and kubeconfigs of a lab, generated once into the lab's directory.

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
use serde_json::{Value, json};

/// The directory of a lab's keys and certificates.
#[derive(Clone, Debug)]
pub struct Pki {
    dir: PathBuf,
}

/// The identity and names in a certificate.
pub struct CertSubject<'a> {
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

    /// Generates the CAs and the ServiceAccount signing key unless they exist.
    pub fn create_cas(&self) -> Result<()> {
        fs::create_dir_all(&self.dir).with_context(|| format!("create {}", self.dir.display()))?;
        for name in ["ca", "front-proxy-ca"] {
            if self.dir.join(format!("{name}.crt")).exists() {
                continue;
            }
            let key = KeyPair::generate().context("generate a key")?;
            let mut params = CertificateParams::default();
            params.distinguished_name = distinguished_name(name, None);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
            let certificate = params.self_signed(&key).with_context(|| format!("sign {name}"))?;
            self.write(&format!("{name}.key"), &key.serialize_pem())?;
            self.write(&format!("{name}.crt"), &certificate.pem())?;
        }
        if !self.dir.join("sa.pub").exists() {
            let key = KeyPair::generate().context("generate a key")?;
            self.write("sa.key", &key.serialize_pem())?;
            self.write("sa.pub", &key.public_key_pem())?;
        }
        Ok(())
    }

    /// Generates `<file>.crt` and `<file>.key`, signed by a CA, unless they exist.
    pub fn certificate(&self, ca: &str, file: &str, subject: &CertSubject<'_>) -> Result<()> {
        if self.dir.join(format!("{file}.crt")).exists() {
            return Ok(());
        }
        let read =
            |name: String| fs::read_to_string(self.dir.join(&name)).with_context(|| format!("read {name}"));
        let ca_key = KeyPair::from_pem(&read(format!("{ca}.key"))?).context("parse the CA's key")?;
        let issuer = Issuer::from_ca_cert_pem(&read(format!("{ca}.crt"))?, ca_key)
            .context("parse the CA's certificate")?;
        let names: Vec<String> = subject.names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names).context("set the certificate's names")?;
        params.subject_alt_names.extend(subject.addresses.iter().map(|a| SanType::IpAddress(*a)));
        params.distinguished_name = distinguished_name(subject.user, subject.group);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().context("generate a key")?;
        let certificate = params.signed_by(&key, &issuer).with_context(|| format!("sign {file}"))?;
        // The certificate last: its presence marks the pair as complete.
        self.write(&format!("{file}.key"), &key.serialize_pem())?;
        self.write(&format!("{file}.crt"), &certificate.pem())
    }

    /// A self-contained kubeconfig with embedded certificates.
    pub fn kubeconfig(&self, file: &str, server: &str) -> Result<String> {
        let user = json!({
            "client-certificate-data": self.base64(&format!("{file}.crt"))?,
            "client-key-data": self.base64(&format!("{file}.key"))?,
        });
        self.kubeconfig_of(file, &user, server)
    }

    /// A self-contained kubeconfig with a bearer token.
    pub fn token_kubeconfig(&self, user: &str, token: &str, server: &str) -> Result<String> {
        self.kubeconfig_of(user, &json!({"token": token}), server)
    }

    /// A file of the directory in base64.
    fn base64(&self, name: &str) -> Result<Value> {
        let bytes = fs::read(self.dir.join(name)).with_context(|| format!("read {name}"))?;
        Ok(json!(k8s_openapi::ByteString(bytes)))
    }

    fn kubeconfig_of(&self, name: &str, user: &Value, server: &str) -> Result<String> {
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": {
                "server": server, "certificate-authority-data": self.base64("ca.crt")?,
            }}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": name}}],
            "current-context": "lab",
        });
        serde_json::to_string_pretty(&config).context("serialize the kubeconfig")
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        write_secret(&self.dir.join(name), text)
    }
}

/// Writes a file atomically, readable by root only.
pub fn write_secret(path: &Path, text: &str) -> Result<()> {
    use std::io::Write as _;
    let partial = path.with_extension("partial");
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&partial)
        .with_context(|| format!("create {}", partial.display()))?;
    file.write_all(text.as_bytes()).with_context(|| format!("write {}", partial.display()))?;
    fs::rename(&partial, path).with_context(|| format!("rename to {}", path.display()))
}

fn distinguished_name(user: &str, group: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, user);
    if let Some(group) = group {
        name.push(DnType::OrganizationName, group);
    }
    name
}
