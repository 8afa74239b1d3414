use rustls::{
    RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier},
    pki_types::{ServerName, UnixTime},
};

use super::*;

const NAME: &str = "hook.ns.svc";

fn valid() -> Validity {
    Validity::starting(SystemTime::now(), Duration::from_hours(1))
}

/// An authority, a leaf that it signed, and the Secret that carries both.
struct Chain {
    authority: Made,
    leaf: Made,
}

impl Chain {
    fn new() -> Self {
        Self::of(valid())
    }

    fn of(validity: Validity) -> Self {
        let authority = found(validity).unwrap();
        let id = read_bundle(authority.certificate.as_bytes()).authorities.remove(0).id;
        let leaf = sign(&id, authority.key.as_bytes(), NAME.to_owned(), validity).unwrap();
        Self { authority, leaf }
    }

    fn id(&self) -> Id {
        read_bundle(self.authority.certificate.as_bytes()).authorities.remove(0).id
    }

    fn data(&self) -> BTreeMap<String, ByteString> {
        let parts = [
            (AUTHORITIES, &self.authority.certificate),
            (AUTHORITY_KEY, &self.authority.key),
            (LEAF, &self.leaf.certificate),
            (LEAF_KEY, &self.leaf.key),
        ];
        parts.map(|(key, text)| (key.to_owned(), ByteString(text.clone().into_bytes()))).into()
    }

    fn with(&self, key: &str, bytes: impl AsRef<[u8]>) -> Held {
        let mut data = self.data();
        data.insert(key.to_owned(), ByteString(bytes.as_ref().to_vec()));
        read_secret(&data)
    }
}

/// What an API server would say of `leaf` when it trusts `bundle`.
fn verifies(bundle: &str, leaf: &str, name: &str, at: SystemTime) -> bool {
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(authority.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
    let leaf = CertificateDer::from_pem_slice(leaf.as_bytes()).unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let at = UnixTime::since_unix_epoch(at.duration_since(UNIX_EPOCH).unwrap());
    verifier.verify_server_cert(&leaf, &[], &name, &[], at).is_ok()
}

#[test]
fn a_signed_leaf_verifies_against_its_authority_and_no_other() {
    let (chain, other) = (Chain::new(), Chain::new());
    let now = SystemTime::now();
    let (own, leaf) = (&chain.authority.certificate, &chain.leaf.certificate);
    assert!(verifies(own, leaf, NAME, now));
    assert!(verifies(&(other.authority.certificate.clone() + own), leaf, NAME, now));
    assert!(!verifies(&other.authority.certificate, leaf, NAME, now));
    assert!(!verifies(own, leaf, "bank.example", now));
}

#[test]
fn a_leaf_is_good_for_its_validity_only() {
    let chain = Chain::new();
    let good = |at| verifies(&chain.authority.certificate, &chain.leaf.certificate, NAME, at);
    let now = SystemTime::now();
    assert!(good(now - Duration::from_secs(299)) && good(now + Duration::from_secs(3590)));
    assert!(!good(now - Duration::from_secs(302)) && !good(now + Duration::from_secs(3602)));
}

#[test]
fn what_is_made_is_read_back() {
    let chain = Chain::new();
    let held = read_secret(&chain.data());
    let id = chain.id();
    let leaf = held.leaf.unwrap();
    assert_eq!((held.signer.as_ref(), leaf.signed_by.as_ref()), (Some(&id), Some(&id)));
    assert_eq!(leaf.names, [NAME.to_owned()].into());
    assert_eq!(held.bundle.authorities.len(), 1);
    assert_eq!(held.bundle.authorities[0].origin, Origin::Ours);
    let seconds = |validity: Validity| {
        [validity.from, validity.until].map(|at| at.duration_since(UNIX_EPOCH).unwrap().as_secs())
    };
    let age = seconds(leaf.validity)[1] - seconds(leaf.validity)[0];
    assert!((3899..=3901).contains(&age), "{age}");
}

#[test]
fn a_bundle_is_read_in_order_and_written_back_the_same() {
    let chains = [Chain::new(), Chain::new(), Chain::new()];
    let text: String = chains.iter().map(|chain| chain.authority.certificate.clone()).collect();
    let bundle = read_bundle(text.as_bytes());
    let ids: Vec<_> = bundle.authorities.iter().map(|authority| authority.id.clone()).collect();
    assert_eq!(ids, chains.each_ref().map(Chain::id));
    assert_eq!(read_bundle(bundle_pem(&ids).as_bytes()), bundle);
    assert!(!bundle.damaged);
}

#[test]
fn the_leaf_after_a_new_authority_is_known_to_be_signed_by_the_old_one() {
    let (old, new) = (Chain::new(), Chain::new());
    let mut data = old.data();
    let bundle = new.authority.certificate.clone() + &old.authority.certificate;
    data.insert(AUTHORITIES.to_owned(), ByteString(bundle.into_bytes()));
    data.insert(AUTHORITY_KEY.to_owned(), ByteString(new.authority.key.clone().into_bytes()));
    let held = read_secret(&data);
    assert_eq!(held.signer, Some(new.id()));
    assert_eq!(held.leaf.unwrap().signed_by, Some(old.id()));
}

#[test]
fn damage_is_seen_and_what_can_be_read_is_kept() {
    let (chain, other) = (Chain::new(), Chain::new());
    let good = &chain.authority.certificate;
    let torn = good.replace("MII", "M!I");
    let cut = &other.authority.certificate[..other.authority.certificate.len() / 2];
    let bundles = [torn.clone() + good, format!("{good}{cut}"), format!("{good}{}", chain.leaf.certificate)];
    for bundle in bundles {
        let held = chain.with(AUTHORITIES, &bundle);
        assert!(held.bundle.damaged, "{bundle}");
        assert_eq!((held.bundle.authorities.len(), held.signer), (1, Some(chain.id())), "{bundle}");
    }
    assert_eq!(chain.with(AUTHORITIES, "junk").signer, None);
    assert_eq!(chain.with(AUTHORITY_KEY, &other.authority.key).signer, None);
    assert_eq!(chain.with(AUTHORITY_KEY, [0xff; 40]).signer, None);
    for (key, bytes) in
        [(LEAF, "junk"), (LEAF, ""), (LEAF_KEY, "junk"), (LEAF_KEY, &other.leaf.key), (LEAF, &torn)]
    {
        assert_eq!(chain.with(key, bytes).leaf, None, "{key}");
    }
    let foreign = BTreeMap::from([(LEAF, &other.leaf.certificate), (LEAF_KEY, &other.leaf.key)]);
    let mut data = chain.data();
    data.extend(
        foreign.into_iter().map(|(key, text)| (key.to_owned(), ByteString(text.clone().into_bytes()))),
    );
    assert_eq!(read_secret(&data).leaf.unwrap().signed_by, None);
    assert_eq!(read_secret(&BTreeMap::new()), Held::default());
}

#[test]
fn an_authority_of_somebody_else_is_told_from_ours() {
    let key = KeyPair::generate().unwrap();
    let mut params = params(valid());
    params.distinguished_name = name("somebody".to_owned());
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let text = params.self_signed(&key).unwrap().pem();
    assert_eq!(read_bundle(text.as_bytes()).authorities[0].origin, Origin::Foreign);
}

#[test]
fn what_the_secret_holds_can_be_served() {
    let chain = Chain::new();
    let config = server_config(&chain.data()).unwrap();
    assert_eq!(config.alpn_protocols, [b"h2".to_vec(), b"http/1.1".to_vec()]);
    let mut data = chain.data();
    data.insert(LEAF_KEY.to_owned(), ByteString(Chain::new().leaf.key.into_bytes()));
    assert!(server_config(&data).is_err());
    assert!(server_config(&BTreeMap::new()).is_err());
}
