// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"encoding/pem"
	"errors"
	"path/filepath"

	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/services/store/internal/access"
	"github.com/sluice-net/sluice/services/store/internal/accounts"
	"github.com/sluice-net/sluice/services/store/internal/enrol"
	"github.com/sluice-net/sluice/services/store/internal/lease"
	"github.com/sluice-net/sluice/services/store/internal/member"
	"github.com/sluice-net/sluice/store"
)

// cluster is the Kubernetes cluster of a store. Its fields are zero for a store on machines.
type cluster struct {
	client  *kube.Client
	lease   *lease.Lease
	account func(ctx context.Context, token string) (node string, err error)
	nodes   *accounts.Nodes
	id      string       // ID of the store's data
	found   member.Found // how the store begins, if it has no data

	controllers *accounts.Controllers
}

// reviews is the maximum number of requests per second from this process to the Kubernetes API. All nodes enrol when an
// epoch begins, and each enrolment is a request.
const reviews = 100

// maxStarts is how often the process starts with the same data if etcd does not become ready. In Kubernetes, the data
// are only a cache.
const maxStarts = 2

// begin waits until this process may run the store. Outside of Kubernetes it returns at once.
func begin(ctx context.Context, p *process.Process, cfg Config) (*cluster, error) {
	if !cfg.Kubernetes.Enabled() {
		return &cluster{}, nil
	}
	client, err := kube.New(cfg.Kubernetes.Settings, kube.Options{
		Name: "sluice-store", StateFile: filepath.Join(cfg.StateDir, "kubernetes-api.json"), Log: p.Log,
	})
	if err != nil {
		return nil, err
	}
	client.Config.QPS, client.Config.Burst = reviews, 2*reviews
	tokens, err := accounts.New(client, cfg.Kubernetes.Namespace)
	if err != nil {
		return nil, err
	}
	c := &cluster{client: client, account: tokens.Node}
	if c.nodes, err = accounts.NewNodes(client, 2*cfg.Kubernetes.Takeover, p.Log); err != nil {
		return nil, err
	}
	if c.controllers, err = accounts.NewControllers(
		client, cfg.Kubernetes.Namespace, cfg.Kubernetes.Takeover/6, p.Log,
	); err != nil {
		return nil, err
	}
	if c.lease, err = lease.New(lease.Options{
		Client: client, Namespace: cfg.Kubernetes.Namespace, Takeover: cfg.Kubernetes.Takeover,
		Answers: func(ctx context.Context, s store.Published) bool { return s.Answers(ctx) }, Log: p.Log,
	}); err != nil {
		return nil, err
	}
	if failed := member.FailedStarts(cfg.StateDir); failed >= maxStarts {
		p.Log.Error("etcd did not start with its data; they are removed, and the next epoch begins without", "starts", failed)
		if err := member.Clear(cfg.StateDir); err != nil {
			return nil, err
		}
	}
	var own lease.Data
	own.Epoch, own.ID = member.Stored(cfg.StateDir)
	token := member.NewToken()
	p.Log.Info("standing by until the Lease allows this process to run the store", "epoch", own.Epoch)
	p.Standby(true)
	data, err := c.lease.Acquire(ctx, own, member.ID(token))
	p.Standby(false)
	if err != nil {
		return nil, err
	}
	c.id = data.ID
	if data != own {
		p.Log.Warn("the store begins an epoch without data; nodes write what they hold", "epoch", data.Epoch)
		c.found = member.Found{Epoch: data.Epoch, ClusterToken: token}
		if err := member.Clear(cfg.StateDir); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// starts counts a start in Kubernetes until etcd is ready.
func (c *cluster) starts(cfg Config) error {
	if c.lease == nil {
		return nil
	}
	return member.BeginStart(cfg.StateDir)
}

// started ends the count that starts began.
func (c *cluster) started(cfg Config) error {
	if c.lease == nil {
		return nil
	}
	return member.EndStart(cfg.StateDir)
}

// unusable handles a state directory that cannot be used. In Kubernetes the data are a cache: they are removed, and
// the next process begins an epoch without them.
func (c *cluster) unusable(err error, cfg Config) error {
	if c.lease == nil {
		return process.Misconfigured(err)
	}
	return errors.Join(err, member.Clear(cfg.StateDir))
}

// keep renews the Lease, and allows new numbers while it is renewed.
func (c *cluster) keep(ctx context.Context, m *member.Member, rights *access.Access, enrolPort int) error {
	published := func() store.Published {
		at := enrol.Members(m, enrolPort)
		ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: m.Authority.NodeCA()})
		return store.Published{
			Epoch: m.Epoch(), ID: c.id, Clients: at.GetClientAddresses(), Enrol: at.GetEnrolAddresses(), CA: string(ca),
		}
	}
	return c.lease.Keep(ctx, published, func(ctx context.Context) error {
		return errors.Join(rights.Allow(ctx, c.lease.Allowed()), rights.LimitSettings(ctx))
	})
}

// forget withdraws the credentials of nodes whose Node was deleted.
func (c *cluster) forget(ctx context.Context, rights *access.Access) error {
	have := func(ctx context.Context) (names []string, err error) {
		nodes, err := rights.Nodes(ctx)
		for _, n := range nodes {
			names = append(names, n.Name)
		}
		return names, err
	}
	return c.nodes.Run(ctx, have, func(ctx context.Context, node string) error {
		_, err := rights.Revoke(ctx, node, false)
		return err
	})
}
