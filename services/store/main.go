// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// sluice-store is the etcd that Sluice runs itself, with credentials for each node. See docs/store.md.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/store/internal/access"
	"github.com/sluice-net/sluice/services/store/internal/enrol"
	"github.com/sluice-net/sluice/services/store/internal/gateway"
	"github.com/sluice-net/sluice/services/store/internal/member"
	"github.com/sluice-net/sluice/services/store/internal/server"
)

func main() { os.Exit(process.Run("store", defaults, run)) }

func run(ctx context.Context, p *process.Process, cfg Config) error {
	started := time.Now()
	makeDirectories(cfg)
	cluster, err := begin(ctx, p, cfg)
	if err != nil {
		return err
	}
	if err := cluster.starts(cfg); err != nil {
		return err
	}
	m, err := process.Phase(p, "start etcd", func() (*member.Member, error) {
		m, err := member.Open(member.Settings{
			Dir: cfg.StateDir, Name: cfg.Node, Address: cfg.Address, ClientPort: cfg.ClientPort, MemberPort: cfg.MemberPort,
			Quota: int64(cfg.Quota), Found: cluster.found, Now: time.Now, Log: p.Log,
		})
		if errors.Is(err, member.ErrState) {
			return nil, cluster.unusable(err, cfg)
		}
		return m, err
	})
	if err != nil {
		return err
	}
	p.OnExit(m.Close)
	if m.Name() != cfg.Node {
		return process.Misconfigured(fmt.Errorf("node: the member in %s is called %q and the setting is %q: "+
			"set the name back", cfg.StateDir, m.Name(), cfg.Node))
	}
	cert, err := certificates(m)
	if err != nil {
		return err
	}
	rights := access.New(m.Server(), cfg.Prefix, time.Now)
	clients := gateway.New(gateway.Options{
		Etcd: m.Server(), LocalNode: cfg.Node, LocalUser: instance.IdentityID, Certificate: cert.Load,
		Nodes: m.Authority.Nodes(), Check: rights.Check, Now: time.Now, Log: p.Log,
	})
	reasons := server.Reasons()
	enrolment := enrol.New(enrol.Options{
		Member: m, Access: rights, Certificate: cert.Load, EnrolPort: cfg.EnrolPort, MemberPort: cfg.MemberPort,
		Answer: reasons.Status, Log: p.Log, Now: time.Now, Account: cluster.account,
	})
	service := server.New(server.Options{
		Version: version.Get().String(), Started: started, Member: m, Access: rights,
		ClientPort: cfg.ClientPort, EnrolPort: cfg.EnrolPort,
		Process: wire.NewProcess(p.Effective.Paths.Name, p.Effective.File, p.Effective.Ignored, p.Effective.Each,
			p.LogLevel, p.Log),
	})
	if err := p.Metrics.Register(service.Collector()); err != nil {
		return err
	}
	listeners, err := listen(cfg, m.Address())
	if err != nil {
		return err
	}
	if err := p.Confine(cfg.files(cluster.client)); err != nil {
		return err
	}
	srv, err := p.NewServer(rpc.Options{Register: service.Register, Methods: server.Methods()})
	if err != nil {
		return err
	}
	p.Go("etcd", m.Run)
	p.Go("connections of nodes", clients.Sweep)
	p.Go("certificates", func(ctx context.Context) error { return renew(ctx, m, cert, p) })
	p.Waiting("waiting for a leader")
	p.Go("clients", func(ctx context.Context) error {
		defer listeners.close()
		err := m.Ready(ctx)
		if err == nil || ctx.Err() != nil {
			err = errors.Join(err, cluster.started(cfg))
		}
		if err != nil {
			return unlessDone(ctx, err)
		}
		p.Go("maintenance", m.Maintain)
		if !prepare(ctx, rights, m.Epoch(), cfg, p) {
			return nil
		}
		failed := make(chan error, 3)
		go func() { failed <- clients.Serve(listeners.local) }()
		if listeners.clients != nil {
			go func() { failed <- clients.Serve(listeners.clients) }()
			go func() { failed <- enrolment.Serve(listeners.enrol) }()
		}
		if cluster.lease != nil {
			p.Go("deleted nodes", func(ctx context.Context) error { return cluster.forget(ctx, rights) })
			p.Go("podCIDRs", func(ctx context.Context) error { return cluster.controllers.Run(ctx, rights.LetAssign) })
			p.Go("Lease", func(ctx context.Context) error { return cluster.keep(ctx, m, rights, cfg.EnrolPort) })
		}
		srv.SetAllServing(true)
		p.Ready()
		select {
		case err = <-failed:
		case <-ctx.Done():
		}
		clients.Stop()
		enrolment.Stop()
		if errors.Is(err, grpc.ErrServerStopped) {
			err = nil
		}
		return unlessDone(ctx, err)
	})
	return p.Serve(ctx, srv)
}

// makeDirectories makes the directories of the service where their parents let it, as in a pod. Elsewhere "sluice
// prepare" makes them, and an error is one of the files below.
func makeDirectories(cfg Config) {
	_ = os.Mkdir(cfg.StateDir, 0o700)
	_ = os.Mkdir(filepath.Dir(cfg.EtcdSocket), 0o750)
}

func unlessDone(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// prepare makes the users and roles of the store and, except in Kubernetes, of this machine's node. It retries until it
// succeeds: a new member has to wait for the others. It returns false if ctx ends first. No client is served before it
// returns true.
func prepare(ctx context.Context, rights *access.Access, epoch uint64, cfg Config, p *process.Process) bool {
	for logged := false; ; {
		limited, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := rights.Prepare(limited, epoch)
		switch {
		case err != nil:
		case cfg.Kubernetes.Enabled():
			err = rights.Forbid(limited)
		default:
			err = rights.AllowLocal(limited, cfg.Node)
		}
		cancel()
		if err == nil {
			return true
		}
		if !logged && ctx.Err() == nil {
			p.Log.Warn("the store cannot serve nodes yet; it tries again", log.Err(err))
			logged = true
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return false
		}
	}
}

// certificates returns the place of this member's certificate for its servers.
func certificates(m *member.Member) (*atomic.Pointer[tls.Certificate], error) {
	var cert atomic.Pointer[tls.Certificate]
	first, err := m.Authority.Server(m.Name(), m.Epoch())
	if err != nil {
		return nil, err
	}
	cert.Store(first)
	return &cert, nil
}

// renew replaces this member's certificate for its servers every day. A certificate is valid for seven days.
func renew(ctx context.Context, m *member.Member, cert *atomic.Pointer[tls.Certificate], p *process.Process) error {
	tick := time.NewTicker(24 * time.Hour)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			next, err := m.Authority.Server(m.Name(), m.Epoch())
			if err != nil {
				p.Log.Error("renew the certificate of this member", log.Err(err))
				continue
			}
			cert.Store(next)
		case <-ctx.Done():
			return nil
		}
	}
}

// listeners are where clients connect.
type listeners struct {
	local, clients, enrol net.Listener // clients and enrol are nil without an address
}

func (l *listeners) close() {
	for _, x := range []net.Listener{l.local, l.clients, l.enrol} {
		if x != nil {
			x.Close() //nolint:errcheck // the server may have closed it
		}
	}
}

// listen opens the sockets. All members of the group may connect to the unix socket; the gateway then checks the user
// ID.
func listen(cfg Config, address string) (l *listeners, err error) {
	l = &listeners{}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	if err := os.Remove(cfg.EtcdSocket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove the socket of the former process: %w", err)
	}
	if l.local, err = net.Listen("unix", cfg.EtcdSocket); err != nil {
		return nil, fmt.Errorf("listen in %s: %w", filepath.Dir(cfg.EtcdSocket), err)
	}
	if err := os.Chmod(cfg.EtcdSocket, 0o660); err != nil {
		return nil, err
	}
	if address == "" {
		return l, nil
	}
	if l.clients, err = net.Listen("tcp", net.JoinHostPort(address, strconv.Itoa(cfg.ClientPort))); err != nil {
		return nil, fmt.Errorf("clientPort: %w", err)
	}
	if l.enrol, err = net.Listen("tcp", net.JoinHostPort(address, strconv.Itoa(cfg.EnrolPort))); err != nil {
		return nil, fmt.Errorf("enrolPort: %w", err)
	}
	return l, nil
}
