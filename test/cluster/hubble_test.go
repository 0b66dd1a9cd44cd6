// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// authority signs the certificates of a test.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "hubble"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{certificate: certificate, key: key}
}

// issue writes ca.crt, tls.crt and tls.key for names to a directory that only a user can read.
func (a *authority) issue(t *testing.T, dir string, user int, names ...string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), DNSNames: names, NotBefore: a.certificate.NotBefore,
		NotAfter: a.certificate.NotAfter, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}, a.certificate, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(dir, user, user); err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{
		"ca.crt":  {Type: "CERTIFICATE", Bytes: a.certificate.Raw},
		"tls.crt": {Type: "CERTIFICATE", Bytes: der}, "tls.key": {Type: "PRIVATE KEY", Bytes: pkcs8},
	} {
		path := filepath.Join(dir, file)
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(path, user, user); err != nil {
			t.Fatal(err)
		}
	}
}

// hubblePort is the port of sluice-hubble on every node.
const hubblePort = 4244

// listens restarts sluice-hubble of a node, so that it listens at the node's address with a certificate for its name.
func (a *authority) listens(t *testing.T, n *devnode.Node) {
	t.Helper()
	a.listensAs(t, n, []string{n.Name()})
}

// listensAs is listens with a certificate for other names, and further arguments.
func (a *authority) listensAs(t *testing.T, n *devnode.Node, names []string, args ...string) {
	t.Helper()
	dir := filepath.Join(n.Paths().ServiceStateDir(devnode.Hubble), "tls")
	a.issue(t, dir, int(instance.HubbleID), names...)
	if err := n.SetArgs(devnode.Hubble, append(args, fmt.Sprintf("--listen-address=%s", hubbleAddress(n)),
		"--listen-cert="+filepath.Join(dir, "tls.crt"), "--listen-key="+filepath.Join(dir, "tls.key"),
		"--listen-client-ca="+filepath.Join(dir, "ca.crt"))...); err != nil {
		t.Fatal(err)
	}
	if err := n.Restart(t.Context(), devnode.Hubble); err != nil {
		t.Fatal(err)
	}
}

func hubbleAddress(n *devnode.Node) string {
	return netip.AddrPortFrom(n.Addresses()[0], hubblePort).String()
}

// hubblePeer is a message about a peer.
type hubblePeer struct {
	Name, Address, Type string
	TLS                 struct{ ServerName string }
}

// hubbleFlow is a part of an answer of GetFlows.
type hubbleFlow struct {
	Flow struct {
		Verdict, NodeName string
		Source            struct{ PodName string }
		Destination       struct{ PodName string }
	}
}

// hubbleClient calls sluice-hubble of any node with a certificate of the authority.
type hubbleClient struct{ dir string }

func (a *authority) client(t *testing.T, name string) hubbleClient {
	t.Helper()
	c := hubbleClient{filepath.Join(t.TempDir(), "tls")}
	a.issue(t, c.dir, 0, name)
	return c
}

// call calls a method until take returns false or the answer ends.
func call[T any](
	ctx context.Context, c hubbleClient, server, address, method, request string, take func(T) bool,
) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	//nolint:gosec // a tool of this repository
	cmd := exec.CommandContext(ctx, filepath.Join(binDir(), "tools/grpcurl"), "-cacert", filepath.Join(c.dir, "ca.crt"),
		"-cert", filepath.Join(c.dir, "tls.crt"), "-key", filepath.Join(c.dir, "tls.key"), "-servername", server,
		"-d", request, address, method)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	for d := json.NewDecoder(out); ; {
		var m T
		err := d.Decode(&m)
		if errors.Is(err, io.EOF) {
			if err := cmd.Wait(); err != nil {
				return fmt.Errorf("%s at %s: %w: %s", method, address, err, errOut.String())
			}
			return nil
		}
		if err != nil || !take(m) {
			cancel()
			_ = cmd.Wait() // it was killed
			return err
		}
	}
}

// TestPeersOfHubbleAreTheNodesOfTheCluster: a client gets the list of all nodes from one node, as hubble-relay does.
// It reads the flows of each node at the address and with the server name in the list. When a node joins or is
// forgotten, the client gets a change.
func TestPeersOfHubbleAreTheNodesOfTheCluster(t *testing.T) {
	t.Parallel()
	c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Options: devnode.Options{Hubble: true}})
	ca := newAuthority(t)
	relay := ca.client(t, "relay")
	var pods []pod.Pod
	for i, n := range c.nodes {
		ca.listens(t, n.Node)
		pods = append(pods, n.add(t, fmt.Sprint("app-", i)))
	}
	servicetest.EventuallyNil(t, "the pods reach each other", func() error {
		return exchange(t.Context(), pods[0], pods[1], pods[1].IPv4)
	})
	first, second := c.nodes[0], c.nodes[1]
	peers := map[string]hubblePeer{}
	var joined *devnode.Node
	take := func(p hubblePeer) bool {
		if p.TLS.ServerName != p.Name {
			t.Errorf("the server name of %s is %q", p.Name, p.TLS.ServerName)
		}
		if p.Type == "PEER_DELETED" {
			delete(peers, p.Name)
		} else {
			peers[p.Name] = p
		}
		switch {
		case joined == nil && len(peers) == 2 && peers[second.Name()].Address != "":
			var err error
			if joined, err = c.AddNode(t.Context()); err != nil {
				t.Error(err)
				return false
			}
		case joined != nil && len(peers) == 3 && peers[joined.Name()].Address != "" && p.Name == joined.Name():
			if peers[joined.Name()].Address != hubbleAddress(joined) {
				t.Errorf("the address of the node that joined is %s, want %s", p.Address, hubbleAddress(joined))
			}
			if err := joined.Kill(t.Context(), devnode.Identity); err != nil {
				t.Error(err)
				return false
			}
			if _, err := first.run(t.Context(), "node", "forget", joined.Name(), "--force"); err != nil {
				t.Error(err)
				return false
			}
		case joined != nil && len(peers) == 2 && p.Type == "PEER_DELETED":
			return false
		}
		return true
	}
	err := call(t.Context(), relay, first.Name(), hubbleAddress(first.Node), "peer.Peer/Notify", "{}", take)
	if err != nil || len(peers) != 2 {
		t.Fatalf("peers %v: %v", peers, err)
	}
	for i, n := range c.nodes {
		p := peers[n.Name()]
		if p.Address != hubbleAddress(n.Node) {
			t.Errorf("the address of %s is %s, want %s", n.Name(), p.Address, hubbleAddress(n.Node))
		}
		servicetest.EventuallyNil(t, "flows of "+n.Name(), func() error {
			found := 0
			err := call(t.Context(), relay, p.TLS.ServerName, p.Address, "observer.Observer/GetFlows", "{}",
				func(f hubbleFlow) bool {
					if f.Flow.NodeName == n.Name() && f.Flow.Verdict == "FORWARDED" &&
						(f.Flow.Source.PodName == pods[i].Name || f.Flow.Destination.PodName == pods[i].Name) {
						found++
					}
					return true
				})
			if err == nil && found == 0 {
				err = errors.New("none")
			}
			return err
		})
	}
	// Another node's name is refused: a node cannot pretend to be another one.
	err = call(t.Context(), relay, second.Name(), hubbleAddress(first.Node), "observer.Observer/ServerStatus", "{}",
		func(map[string]any) bool { return true })
	if err == nil {
		t.Error("the first node has a certificate for the name of the second one")
	}
}
