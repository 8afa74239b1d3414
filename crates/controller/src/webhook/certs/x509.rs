//! X.509: creates certificates with rcgen, parses them with x509-parser, encodes them as PEM.
//!
//! Nothing parsed here is assumed to be well formed: whatever cannot be parsed counts as corrupt or missing, and
//! `plan::certs` decides what to do about it.

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use k8s_openapi::ByteString;
use plan::certs::{CaBundle, CaCert, CaOrigin, CertId, LeafCert, Validity};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PublicKeyData,
};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use x509_parser::{
    certificate::X509Certificate,
    extensions::GeneralName,
    pem::Pem,
    prelude::{FromDer, X509Version},
};

/// Data keys of the Secret.
pub const TLS_CRT: &str = "tls.crt";
pub const TLS_KEY: &str = "tls.key";
pub const CA_CRT: &str = "ca.crt";
pub const CA_KEY: &str = "ca.key";

/// Prefix of the common name of our CAs. Identifies them in a webhook configuration after the Secret was lost.
const CA_NAME_PREFIX: &str = "patchbay webhook authority ";

/// Further blocks of a PEM text are ignored.
const MAX_PEM_BLOCKS: usize = 256;

/// Why a certificate could not be created or loaded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("create a certificate")]
    Create(#[source] rcgen::Error),
    #[error("the private key of the CA is not UTF-8")]
    KeyEncoding,
    #[error("parse the serving certificate")]
    Parse(#[source] rustls::pki_types::pem::Error),
    #[error("configure TLS with the serving certificate")]
    Tls(#[source] rustls::Error),
}

/// A certificate and its private key, in PEM.
pub struct PemKeyPair {
    pub certificate: String,
    pub key: String,
}

/// The Secret's data, as far as it can be parsed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SecretContents {
    pub bundle: CaBundle,
    pub signer: Option<CertId>,
    pub leaf: Option<LeafCert>,
}

/// Creates a self-signed CA.
pub fn create_ca(validity: Validity) -> Result<PemKeyPair, Error> {
    let key = KeyPair::generate().map_err(Error::Create)?;
    let mut params = params(validity);
    // Every CA has a unique name, so that verifiers never confuse two of them.
    let key_id = params
        .key_identifier(&key)
        .iter()
        .take(8)
        .fold(0, |key_id: u64, byte| key_id << 8 | u64::from(*byte));
    params.distinguished_name = name(format!("{CA_NAME_PREFIX}{key_id:016x}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let certificate = params.self_signed(&key).map_err(Error::Create)?;
    Ok(PemKeyPair { certificate: certificate.pem(), key: key.serialize_pem() })
}

/// Creates a serving certificate that the CA `signer` signs.
pub fn sign_leaf(
    signer: &CertId,
    key: &[u8],
    dns_name: String,
    validity: Validity,
) -> Result<PemKeyPair, Error> {
    let key = KeyPair::from_pem(std::str::from_utf8(key).map_err(|_| Error::KeyEncoding)?)
        .map_err(Error::Create)?;
    let ca = CertificateDer::from(signer.0.as_slice());
    let issuer = Issuer::from_ca_cert_der(&ca, key).map_err(Error::Create)?;
    let mut params = params(validity);
    params.subject_alt_names = CertificateParams::new([dns_name]).map_err(Error::Create)?.subject_alt_names;
    params.distinguished_name = name("patchbay webhook".to_owned());
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate().map_err(Error::Create)?;
    let certificate = params.signed_by(&key, &issuer).map_err(Error::Create)?;
    Ok(PemKeyPair { certificate: certificate.pem(), key: key.serialize_pem() })
}

fn params(validity: Validity) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.not_before = validity.not_before.into();
    params.not_after = validity.not_after.into();
    params
}

fn name(common: String) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

/// Encodes a bundle as PEM.
pub fn bundle_pem<'a>(ids: impl IntoIterator<Item = &'a CertId>) -> String {
    ids.into_iter().map(|id| pem::encode(&pem::Pem::new("CERTIFICATE", id.0.clone()))).collect()
}

/// Parses a PEM bundle of CAs.
pub fn parse_bundle(text: &[u8]) -> CaBundle {
    let mut bundle = CaBundle::default();
    for block in Pem::iter_from_buffer(text).take(MAX_PEM_BLOCKS) {
        match block.ok().and_then(|block| parse_ca(&block.contents)) {
            Some(ca) => bundle.cas.push(ca),
            None => bundle.corrupt = true,
        }
    }
    bundle
}

fn parse_ca(der: &[u8]) -> Option<CaCert> {
    let certificate = parse_certificate(der)?;
    if !certificate.is_ca() {
        return None;
    }
    let mut names = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok());
    let origin =
        if names.any(|name| name.starts_with(CA_NAME_PREFIX)) { CaOrigin::Ours } else { CaOrigin::Foreign };
    Some(CaCert { id: CertId(der.to_vec()), validity: validity(&certificate), origin })
}

/// Parses the Secret's data.
pub fn parse_secret(data: &BTreeMap<String, ByteString>) -> SecretContents {
    let value = |key: &str| data.get(key).map_or(&[][..], |bytes| &bytes.0);
    let bundle = parse_bundle(value(CA_CRT));
    let signer = signer(&bundle, value(CA_KEY));
    let leaf = parse_leaf(value(TLS_CRT), value(TLS_KEY), &bundle);
    SecretContents { bundle, signer, leaf }
}

fn signer(bundle: &CaBundle, key: &[u8]) -> Option<CertId> {
    let key = public_key_info(key)?;
    let matches = |ca: &&CaCert| parse_certificate(&ca.id.0).is_some_and(|it| it.public_key().raw == key);
    bundle.cas.iter().find(matches).map(|ca| ca.id.clone())
}

fn parse_leaf(text: &[u8], key: &[u8], bundle: &CaBundle) -> Option<LeafCert> {
    let block = Pem::iter_from_buffer(text).next()?.ok()?;
    let certificate = parse_certificate(&block.contents)?;
    if certificate.public_key().raw != public_key_info(key)? {
        return None;
    }
    let signed_leaf = |ca: &&CaCert| {
        parse_certificate(&ca.id.0).is_some_and(|it| {
            it.subject() == certificate.issuer()
                && certificate.verify_signature(Some(it.public_key())).is_ok()
        })
    };
    let signed_by = bundle.cas.iter().find(signed_leaf).map(|ca| ca.id.clone());
    let dns_names =
        certificate.subject_alternative_name().ok()??.value.general_names.iter().map(|name| match name {
            GeneralName::DNSName(name) => (*name).to_owned(),
            // We never sign such a name. Its debug form is not a DNS name, so it matches nothing.
            other => format!("{other:?}"),
        });
    Some(LeafCert { signed_by, validity: validity(&certificate), dns_names: dns_names.collect() })
}

fn parse_certificate(der: &[u8]) -> Option<X509Certificate<'_>> {
    let (rest, certificate) = X509Certificate::from_der(der).ok()?;
    (rest.is_empty() && certificate.version() == X509Version::V3).then_some(certificate)
}

/// The public key of a PEM private key, in the encoding of a certificate.
fn public_key_info(key: &[u8]) -> Option<Vec<u8>> {
    let key = KeyPair::from_pem(std::str::from_utf8(key).ok()?).ok()?;
    Some(key.subject_public_key_info())
}

fn validity(certificate: &X509Certificate<'_>) -> Validity {
    let validity = certificate.validity();
    Validity {
        not_before: time(validity.not_before.timestamp()),
        not_after: time(validity.not_after.timestamp()),
    }
}

/// Dates before 1970 become 1970.
fn time(seconds: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

/// The TLS configuration that serves the Secret's certificate.
pub fn server_config(data: &BTreeMap<String, ByteString>) -> Result<Arc<ServerConfig>, Error> {
    let value = |key: &str| data.get(key).map_or(&[][..], |bytes| &bytes.0);
    let chain = CertificateDer::pem_slice_iter(value(TLS_CRT))
        .collect::<Result<Vec<_>, _>>()
        .map_err(Error::Parse)?;
    let key = PrivateKeyDer::from_pem_slice(value(TLS_KEY)).map_err(Error::Parse)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(Error::Tls)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(Error::Tls)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
