// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc/client"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	words "github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/proto/wire/policywire"
	"github.com/sluice-net/sluice/services/policy/internal/test/synthetic"
)

// user is the service's user.
const user = instance.PolicyID

// patience limits how long the service may take for any operation.
const patience = time.Minute

// registry is an identity service that lists a cluster and then sends nothing more.
type registry struct {
	identityv1.UnimplementedIdentityServiceServer
	cluster *synthetic.Cluster
}

// WatchIdentities implements the service.
func (r *registry) WatchIdentities(_ *identityv1.WatchIdentitiesRequest, s grpc.ServerStreamingServer[identityv1.WatchIdentitiesResponse]) error {
	for _, id := range r.cluster.Identities {
		out := &identityv1.Identity{Number: uint32(id.Number), Labels: words.Labels(id.Labels.All())}
		if err := s.Send(&identityv1.WatchIdentitiesResponse{ResumeToken: []byte("t"), Event: &identityv1.WatchIdentitiesResponse_Upsert{Upsert: out}}); err != nil {
			return err
		}
	}
	done := &identityv1.Bookmark{SnapshotComplete: true}
	if err := s.Send(&identityv1.WatchIdentitiesResponse{ResumeToken: []byte("t"), Event: &identityv1.WatchIdentitiesResponse_Bookmark{Bookmark: done}}); err != nil {
		return err
	}
	<-s.Context().Done()
	return nil
}

// measured is a process of the service.
type measured struct {
	policyv1.PolicyServiceClient
	cmd     *exec.Cmd
	conn    *grpc.ClientConn
	started time.Time
}

// begin starts the service and waits until it serves.
func begin(ctx context.Context, binary, dir string) (*measured, error) {
	m := &measured{started: time.Now()}
	socket := filepath.Join(dir, "policy.sock")
	m.cmd = exec.Command(binary, "--socket-path", socket, "--metrics-address", "off", "--state-dir", filepath.Join(dir, "state"),
		"--sources-identity", filepath.Join(dir, "identity.sock"), "--cluster-name", synthetic.Name, "--cluster-local-only", "--log-level", "error")
	m.cmd.Env = []string{} // the defaults
	m.cmd.Stderr = os.Stderr
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Getuid() == 0 {
		m.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: user, Gid: instance.GroupID}
	}
	if err := m.cmd.Start(); err != nil {
		return nil, err
	}
	var err error
	if m.conn, err = client.Dial(socket, client.Options{WaitForReady: true}); err != nil {
		return nil, errors.Join(err, m.end())
	}
	m.PolicyServiceClient = policyv1.NewPolicyServiceClient(m.conn)
	health := grpc_health_v1.NewHealthClient(m.conn)
	for {
		r, err := health.Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: policyv1.PolicyService_ServiceDesc.ServiceName})
		if err == nil && r.GetStatus() == grpc_health_v1.HealthCheckResponse_SERVING {
			return m, nil
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("wait until %s serves: %w", binary, ctx.Err()), err, m.end())
		}
	}
}

func (m *measured) end() error {
	if m.conn != nil {
		m.conn.Close()
	}
	m.cmd.Process.Signal(syscall.SIGTERM) //nolint:errcheck // the process may have ended already
	return m.cmd.Wait()
}

// cpu returns the CPU time of the process.
func (m *measured) cpu() (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", m.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields", m.cmd.Process.Pid, len(fields))
	}
	user, err := strconv.Atoi(fields[11])
	system, serr := strconv.Atoi(fields[12])
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(err, serr)
}

func (m *measured) memory() (string, error) {
	now, peak, err := residentOf(m.cmd.Process.Pid)
	return fmt.Sprintf("%d MB, peak %d MB", now>>10, peak>>10), err
}

// follow subscribes and acknowledges everything. It returns once the snapshot is complete, and continues until ctx
// ends.
func (m *measured) follow(ctx context.Context, subjects []uint32) (ended chan error, err error) {
	w, err := m.WatchPolicyTables(ctx)
	if err != nil {
		return nil, err
	}
	if err := w.Send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subscribe{
		Subscribe: &policyv1.Subscribe{Name: "datapath", Subjects: subjects, Role: policyv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES, Formats: []policyv1.TableFormat{policywire.Format}},
	}}); err != nil {
		return nil, err
	}
	complete, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			r, err := w.Recv()
			if err == nil {
				err = w.Send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Ack{Ack: &policyv1.Ack{Seq: r.GetSeq()}}})
			}
			if err != nil {
				ended <- err
				return
			}
			if slices.ContainsFunc(r.GetSteps(), func(s *policyv1.Step) bool { return s.GetSnapshotComplete() != nil }) {
				close(complete)
			}
		}
	}()
	select {
	case <-complete:
		return ended, nil
	case err := <-ended:
		return nil, err
	}
}

// serveIdentities starts an identity service with the identities of a cluster.
func serveIdentities(cluster *synthetic.Cluster, socket string) (stop func(), err error) {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(socket, 0o666); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	srv := grpc.NewServer()
	identityv1.RegisterIdentityServiceServer(srv, &registry{cluster: cluster})
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	return func() { srv.Stop(); <-served }, nil
}

// measureService measures the whole process: with its identities, its policies and the subscriber of a datapath.
func measureService(binary string, s synthetic.Shape) (out []line, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cluster, err := synthetic.Make(s)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "policy-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if os.Getuid() == 0 {
		if err := os.Chown(dir, int(user), int(instance.GroupID)); err != nil {
			return nil, err
		}
	}
	stop, err := serveIdentities(cluster, filepath.Join(dir, "identity.sock"))
	if err != nil {
		return nil, err
	}
	defer stop()

	m, err := begin(ctx, binary, dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, m.end()) }()
	note := func(what, value string) { out = append(out, line{what, value}) }
	resident := func(what string) error {
		text, err := m.memory()
		note("resident, "+what, text)
		return err
	}
	begun := time.Now()
	for all := cluster.Manifests; len(all) > 0; {
		part := all[:min(1000, len(all))]
		if _, err := m.UpsertPolicies(ctx, &policyv1.UpsertPoliciesRequest{Manifests: []byte(strings.Join(part, "---\n"))}); err != nil {
			return nil, err
		}
		all = all[len(part):]
	}
	note("policies applied, 1,000 in a call", short(time.Since(begun)))
	var subjects []uint32
	for _, x := range cluster.Subjects {
		subjects = append(subjects, uint32(x))
	}
	slices.Sort(subjects)
	subjects = slices.Compact(subjects)
	begun = time.Now()
	if _, err := m.follow(ctx, subjects); err != nil {
		return nil, err
	}
	note("subjects subscribed, to the end of the snapshot", short(time.Since(begun)))
	if err := resident("everything loaded"); err != nil {
		return nil, err
	}
	for i := range 20 {
		text := strings.ReplaceAll(ofAll, "PORT", strconv.Itoa(1000+i%2))
		r, err := m.UpsertPolicies(ctx, &policyv1.UpsertPoliciesRequest{Manifests: []byte(text)})
		if err != nil {
			return nil, err
		}
		if _, err := m.WaitForRevision(ctx, &policyv1.WaitForRevisionRequest{Revision: r.GetRevision()}); err != nil {
			return nil, err
		}
	}
	if err := resident("after 20 changes of a policy of all subjects"); err != nil {
		return nil, err
	}
	d, err := m.Diff(ctx, &policyv1.DiffRequest{Delete: []*policyv1.PolicyKey{{Kind: "CiliumClusterwideNetworkPolicy", Name: "changed"}}})
	for err == nil {
		_, err = d.Recv()
	}
	if err.Error() != "EOF" {
		return nil, err
	}
	if err := resident("after a Diff"); err != nil {
		return nil, err
	}
	if err := m.end(); err != nil {
		return nil, err
	}
	if m, err = begin(ctx, binary, dir); err != nil {
		return nil, err
	}
	took := time.Since(m.started)
	used, err := m.cpu()
	note("start with that state, to serving", fmt.Sprintf("%s, %s of CPU time", short(took), short(used)))
	if err != nil {
		return nil, err
	}
	if _, err := m.follow(ctx, subjects); err != nil {
		return nil, err
	}
	note("start with that state, to the end of a snapshot", short(time.Since(m.started)))
	return out, resident("after the start")
}
