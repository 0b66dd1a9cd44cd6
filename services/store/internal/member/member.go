// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package member runs one member of the store: etcd's server in this process.
//
// etcd serves only the other members itself. Package gateway serves clients, and decides the user of each.
package member

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.etcd.io/bbolt"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/services/store/internal/authority"
	"github.com/sluice-net/sluice/store"
)

// The files of the state directory that only sluice-store uses.
const (
	dataDir     = "etcd"
	restoredDir = "etcd.restored" // data of an unfinished restore
	peerFile    = "peer.pem"      // certificate and key for the other members
	caFile      = "peer-ca.pem"   // CA of members
	dataLock    = 5 * time.Second // a process that is ending releases the lock
)

// Settings of a Member.
type Settings struct {
	Dir        string // state directory
	Name       string // name of this machine's node; used if the member is the first
	Address    string // IP address for other machines; empty for none, or the one with which it joined
	ClientPort int
	MemberPort int
	Quota      int64 // size of the database above which writes are refused
	// Found are the epoch and the token of a new store; zero: the first epoch, and a random token.
	Found Found
	Now   func() time.Time
	Log   *slog.Logger
}

// Found describes how a new store begins.
type Found struct {
	Epoch        uint64
	ClusterToken string
}

// ErrState wraps errors about the state directory, which a restart does not repair.
var ErrState = errors.New("the state directory cannot be used")

// Member is a running member.
type Member struct {
	Authority *authority.Authority

	o     Settings
	state store.MemberState
	lock  *os.File
	etcd  *embed.Etcd

	// For Maintain only: the first revision that a full database has, and when it may be rewritten.
	compacted int64
	rewrite   time.Time
}

// Open reads the state of the member, makes the state of a new store if the directory is empty, and starts etcd. The
// caller waits with Ready, and calls Close.
func Open(o Settings) (_ *Member, err error) {
	lock, err := durable.Lock(filepath.Join(o.Dir, store.LockFile), dataLock)
	if err != nil {
		return nil, err
	}
	m := &Member{o: o, lock: lock}
	defer func() {
		if err != nil {
			lock.Close() //nolint:errcheck // the process ends
		}
	}()
	if err := m.load(); err != nil {
		return nil, err
	}
	if m.o.Address == "" {
		m.o.Address = m.state.Address
	}
	if err := m.restore(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrState, err)
	}
	if err := checkDatabase(filepath.Join(m.path(dataDir), "member", "snap", "db")); err != nil {
		return nil, fmt.Errorf("%w: %w; see docs/store.md, \"When something fails\"", ErrState, err)
	}
	if err := m.RenewPeer(); err != nil {
		return nil, err
	}
	cfg, err := m.config()
	if err != nil {
		return nil, err
	}
	if m.etcd, err = embed.StartEtcd(cfg); err != nil {
		return nil, fmt.Errorf("start etcd in %s: %w", cfg.Dir, err)
	}
	return m, nil
}

// checkDatabase returns an error for a corrupt or truncated database. etcd would panic, or fail when it first reads a
// page that is missing.
func checkDatabase(path string) error {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && info.Size() == 0 {
		return nil // etcd creates the file from its log
	}
	if err != nil {
		return err
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true, Timeout: dataLock})
	if err != nil {
		return fmt.Errorf("open the database %s: %w", path, err)
	}
	defer db.Close() //nolint:errcheck // a read
	return db.View(func(tx *bbolt.Tx) error {
		if tx.Size() > info.Size() {
			return fmt.Errorf("the database %s has %d bytes, but its pages need %d: it was truncated",
				path, info.Size(), tx.Size())
		}
		return nil
	})
}

// load reads or makes the state.
func (m *Member) load() error {
	path, data := m.path(store.MemberFile), m.path(dataDir)
	_, err := os.Stat(filepath.Join(data, "member"))
	hasData := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", ErrState, err)
	}
	err = durable.Load(path, store.MemberLimit, store.MemberSchema, &m.state)
	switch {
	case errors.Is(err, fs.ErrNotExist) && hasData:
		return fmt.Errorf("%w: %s has data, and %s with the keys of its certificates is missing; "+
			"restore the file, or move both away and join again or restore a snapshot", ErrState, data, path)
	case errors.Is(err, fs.ErrNotExist):
		return m.found(path)
	case err != nil:
		return fmt.Errorf("%w: %w; restore the file from a backup, or remove this member on another one and join again",
			ErrState, err)
	}
	if m.state.Started && !hasData && !m.restores() {
		// If this process started, it would make a second, empty cluster, which nodes with old certificates trust.
		return fmt.Errorf("%w: %s has been lost; restore a snapshot, or remove this member on another one, "+
			"move %s away and join again", ErrState, data, m.o.Dir)
	}
	if m.Authority, err = authority.Decode([]byte(m.state.Authority), m.o.Now); err != nil {
		return fmt.Errorf("%w: %s: authority: %w", ErrState, path, err)
	}
	return nil
}

// NewToken returns a token of etcd's cluster.
func NewToken() string { return rand.Text() }

// found makes the state of a new store.
func (m *Member) found(path string) (err error) {
	if m.Authority, err = authority.New(m.o.Now); err != nil {
		return err
	}
	text, err := m.Authority.Encode()
	if err != nil {
		return err
	}
	found := m.o.Found
	if found.Epoch == 0 {
		found = Found{Epoch: 1, ClusterToken: NewToken()}
	}
	m.state = store.MemberState{
		Name: m.o.Name, Epoch: found.Epoch, ClusterToken: found.ClusterToken, Authority: string(text),
	}
	m.o.Log.Info("making a new store", "member", m.o.Name, "epoch", m.state.Epoch)
	return durable.Save(path, store.MemberSchema, m.state, durable.SyncAll)
}

// RenewPeer writes a new certificate for the other members. etcd reads it at each handshake.
func (m *Member) RenewPeer() error {
	text, err := m.Authority.PeerPEM(m.state.Name)
	if err != nil {
		return err
	}
	if err := durable.WriteFile(m.path(peerFile), text, 0o600, durable.SyncNone); err != nil {
		return err
	}
	return durable.WriteFile(m.path(caFile), m.Authority.MembersPEM(), 0o600, durable.SyncNone)
}

func (m *Member) path(name string) string { return filepath.Join(m.o.Dir, name) }

// nowhere is the address of a member without other members. etcd requires an address, and never dials this one.
var nowhere = url.URL{Scheme: "http", Host: "127.0.0.1:1"}

// URL returns an address in the form of etcd's lists of members.
func URL(address string, port int) url.URL {
	return url.URL{Scheme: "https", Host: net.JoinHostPort(address, fmt.Sprint(port))}
}

// peerURLs returns the address of this member for the others, or nowhere.
func (m *Member) peerURLs() []url.URL {
	if m.o.Address == "" {
		return []url.URL{nowhere}
	}
	return []url.URL{URL(m.o.Address, m.o.MemberPort)}
}

func (m *Member) config() (*embed.Config, error) {
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir = m.state.Name, m.path(dataDir)
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zapTo(m.o.Log))
	// Package gateway serves clients.
	cfg.ListenClientUrls = nil
	cfg.ListenPeerUrls = nil
	cfg.AdvertiseClientUrls, cfg.AdvertisePeerUrls = []url.URL{nowhere}, m.peerURLs()
	if m.o.Address != "" {
		cfg.ListenPeerUrls = m.peerURLs()
		cfg.AdvertiseClientUrls = []url.URL{URL(m.o.Address, m.o.ClientPort)}
		cfg.PeerTLSInfo = transport.TLSInfo{
			CertFile: m.path(peerFile), KeyFile: m.path(peerFile), TrustedCAFile: m.path(caFile), ClientCertAuth: true,
			// All certificates of members contain the same name and no addresses, so that an address may change.
			ServerName: authority.PeerName(), SkipClientSANVerify: true, MinVersion: tls.VersionTLS13,
		}
	}
	cfg.InitialCluster = cfg.Name + "=" + cfg.AdvertisePeerUrls[0].String()
	cfg.InitialClusterToken = m.state.ClusterToken
	if m.state.Joined {
		cfg.InitialCluster, cfg.ClusterState = m.state.InitialCluster, embed.ClusterStateFlagExisting
	}
	// etcd takes the common name of a certificate as its user, including certificates that package gateway makes up.
	cfg.ClientTLSInfo.ClientCertAuth = true
	cfg.EnableGRPCGateway = false
	cfg.StrictReconfigCheck = true
	// With two learners, a cluster can grow from one vote to three. With two votes, both members would be needed.
	cfg.MaxLearners = 2
	cfg.QuotaBackendBytes = m.o.Quota
	// A node that was disconnected for less than this time resumes its watch; otherwise it lists again.
	cfg.AutoCompactionMode, cfg.AutoCompactionRetention = embed.CompactorModePeriodic, "1h"
	cfg.WarningUnaryRequestDuration = time.Second
	cfg.TickMs, cfg.ElectionMs = 100, 1000
	return cfg, nil
}

// Ready waits until etcd has joined its cluster, and then stores that it has data.
func (m *Member) Ready(ctx context.Context) error {
	select {
	case <-m.etcd.Server.ReadyNotify():
	case <-m.etcd.Server.StopNotify():
		return errors.New("etcd stopped while it started; the log says why")
	case err := <-m.etcd.Err():
		return fmt.Errorf("etcd stopped while it started: %w", err)
	case <-ctx.Done():
		return ctx.Err()
	}
	if m.state.Started {
		return nil
	}
	m.state.Started = true
	return durable.Save(m.path(store.MemberFile), store.MemberSchema, m.state, durable.SyncAll)
}

// Run returns an error when etcd stops by itself.
func (m *Member) Run(ctx context.Context) error {
	select {
	case <-m.etcd.Server.StopNotify():
		return errors.New("etcd stopped; if this member was removed, move its state directory away; else the log says why")
	case err := <-m.etcd.Err():
		return fmt.Errorf("etcd stopped: %w", err)
	case <-ctx.Done():
		return nil
	}
}

// Close stops etcd.
func (m *Member) Close() error {
	m.etcd.Close()
	return m.lock.Close()
}

// Name returns the name of this member.
func (m *Member) Name() string { return m.state.Name }

// Epoch returns the epoch of the store.
func (m *Member) Epoch() uint64 { return m.state.Epoch }

// Address returns the IP address for other machines; empty for none.
func (m *Member) Address() string { return m.o.Address }

// root is the peer in calls of this process itself.
var root = &peer.Peer{AuthInfo: AuthInfo("root")}

// AuthInfo returns connection information that etcd accepts as the verified certificate of a user.
func AuthInfo(user string) credentials.TLSInfo {
	c := &x509.Certificate{Subject: pkix.Name{CommonName: user}}
	return credentials.TLSInfo{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
		State:          tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{c}}},
	}
}

// Root returns a context with which calls of Server have every permission.
func Root(ctx context.Context) context.Context {
	return metadata.NewIncomingContext(peer.NewContext(ctx, root), metadata.MD{})
}

// host returns the address and port in a URL of etcd's list; empty for nowhere.
func host(urls []string) string {
	i := slices.IndexFunc(urls, func(u string) bool { return u != nowhere.String() })
	if i < 0 {
		return ""
	}
	_, at, _ := strings.Cut(urls[i], "://")
	return at
}
