// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"errors"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/log"
)

// maxAddresses limits how many addresses are taken from the API or from the state file.
const maxAddresses = 64

var addressSchema = durable.Schema{Name: "sluice.kube.addresses.v1", Version: 1}

// addressRecord is the content of the state file.
type addressRecord struct {
	Addresses []string `json:"addresses"` // https://host:port, sorted
}

// addresses is the list of API servers: the configured ones, then the ones that the API published most recently,
// possibly before a restart.
type addresses struct {
	configured []string
	file       string
	log        *slog.Logger

	mu      sync.Mutex
	all     []string      // guarded by mu; configured, then learned; never empty
	learned []string      // guarded by mu; sorted
	current string        // guarded by mu; an element of all
	changed chan struct{} // guarded by mu; closed when all changes
}

// newAddresses starts with a random configured address, so that the nodes of a cluster do not all use the first
// server.
func newAddresses(configured []string, file string, l *slog.Logger) *addresses {
	a := &addresses{file: file, log: l, changed: make(chan struct{})}
	for _, address := range configured {
		a.configured = append(a.configured, strings.TrimRight(address, "/"))
	}
	a.current = a.configured[rand.IntN(len(a.configured))]
	learned, err := readAddresses(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		l.Error("cannot read the saved addresses of the Kubernetes API; only the configured ones are used", log.Err(err))
	}
	a.take(learned)
	return a
}

func readAddresses(file string) ([]string, error) {
	content, err := durable.ReadFile(file, 1<<16)
	if err != nil {
		return nil, err
	}
	var r addressRecord
	if err := durable.Decode(content, addressSchema, &r); err != nil {
		return nil, &durable.RecordError{File: file, Err: err}
	}
	for _, address := range r.Addresses {
		if err := checkAddress(address); err != nil {
			return nil, &durable.RecordError{File: file, Field: "addresses", Err: err}
		}
	}
	return r.Addresses, nil
}

// take rebuilds all from the configured and the learned addresses. Called with mu held, or before a is shared.
func (a *addresses) take(learned []string) {
	learned = learned[:min(len(learned), maxAddresses)]
	a.learned, a.all = learned, slices.Clone(a.configured)
	for _, address := range learned {
		if !slices.Contains(a.all, address) {
			a.all = append(a.all, address)
		}
	}
	if !slices.Contains(a.all, a.current) {
		a.current = a.all[0]
	}
}

// learn replaces the learned addresses. An empty list is ignored, because some server of the API has just answered.
func (a *addresses) learn(all []string) {
	slices.Sort(all)
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(all) == 0 || slices.Equal(all, a.learned) {
		return
	}
	a.take(all)
	close(a.changed)
	a.changed = make(chan struct{})
	content, err := durable.Encode(addressSchema, addressRecord{Addresses: a.learned})
	if err == nil {
		err = durable.WriteFile(a.file, content, 0o600, durable.SyncFile)
	}
	if err != nil {
		a.log.Error("cannot save the addresses of the Kubernetes API", log.Err(err))
	}
}

// hosts returns the IP addresses of all servers, sorted, and a channel that is closed when the list changes. Servers
// that are configured by name are left out.
func (a *addresses) hosts() ([]netip.Addr, <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []netip.Addr
	for _, address := range a.all {
		u, err := url.Parse(address)
		if err != nil {
			continue
		}
		if ip, err := netip.ParseAddr(u.Hostname()); err == nil {
			out = append(out, ip.Unmap())
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), a.changed
}

// now returns the address to use and the number of known addresses.
func (a *addresses) now() (current string, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.current, len(a.all)
}

// failed moves on to the next address, unless another request has already done so.
func (a *addresses) failed(address string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if address == a.current {
		a.current = a.all[(slices.Index(a.all, address)+1)%len(a.all)]
	}
}

// silent moves on to the next address after a response stopped half-way.
func (a *addresses) silent(address, path string, err error) {
	a.log.Warn("the Kubernetes API stopped in the middle of a response", "server", address, "path", path, log.Err(err))
	a.failed(address)
}

// failover sends requests to one address until it fails, and then to the next one.
type failover struct {
	patient   *patient
	addresses *addresses
}

func newFailover(next http.RoundTripper, a *addresses) *failover {
	return &failover{patient: &patient{next: next, streams: map[string]struct{}{}}, addresses: a}
}

// RoundTrip implements http.RoundTripper. A request without a body, such as a list or a watch, is tried at every
// address before it fails. A request with a body is sent once: the server may have executed it.
func (f *failover) RoundTrip(req *http.Request) (*http.Response, error) {
	address, n := f.addresses.now()
	var failures []error
	for range n {
		to, err := url.Parse(address)
		if err != nil {
			return nil, err
		}
		r := req.Clone(req.Context())
		r.URL.Host, r.Host = to.Host, to.Host
		resp, err := f.patient.roundTrip(r, func(err error) { f.addresses.silent(address, r.URL.Path, err) })
		if err == nil {
			if resp.StatusCode >= http.StatusInternalServerError {
				f.addresses.failed(address) // for the caller's next attempt
			}
			return resp, nil
		}
		if req.Context().Err() != nil {
			return nil, err
		}
		failures = append(failures, err)
		f.addresses.failed(address)
		if req.Body != nil && req.Body != http.NoBody {
			break
		}
		address, _ = f.addresses.now()
	}
	if len(failures) == 1 {
		return nil, failures[0] // client-go depends on the type
	}
	return nil, errors.Join(failures...)
}

// WrappedRoundTripper lets client-go close idle connections.
func (f *failover) WrappedRoundTripper() http.RoundTripper { return f.patient.next }
