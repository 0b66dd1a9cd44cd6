// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package session

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
)

// giveUp is the time that the client of these tests waits for the first answer of a lease. Its default is five seconds;
// a value of one second would be taken as that default.
const giveUp = 2 * time.Second

// lateAnswers is a connection to etcd that holds back the answers of the first stream of renewals until they are
// released. The client has this stream for all leases. Requests about one lease have a stream of their own.
type lateAnswers struct {
	etcdserverpb.LeaseClient
	release chan struct{}

	mu      sync.Mutex
	streams int           // guarded by mu
	renewed map[int64]int // guarded by mu; number of answers on the first stream, by lease
	asked   map[int64]int // guarded by mu; number of answers on all other streams, by lease
	refuse  int           // guarded by mu; how many requests on the other streams still fail
}

// answerLate replaces what a session that was not used yet reaches leases by.
func answerLate(s *Session) *lateAnswers {
	l := &lateAnswers{
		LeaseClient: clientv3.RetryLeaseClient(s.client), release: make(chan struct{}),
		renewed: map[int64]int{}, asked: map[int64]int{},
	}
	s.client.Lease = clientv3.NewLeaseFromLeaseClient(l, s.client, giveUp)
	return l
}

func (l *lateAnswers) LeaseKeepAlive(ctx context.Context, opts ...grpc.CallOption,
) (etcdserverpb.Lease_LeaseKeepAliveClient, error) {
	stream, err := l.LeaseClient.LeaseKeepAlive(ctx, opts...)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.streams > 0 && l.refuse > 0 {
		l.refuse--
		return nil, status.Error(codes.PermissionDenied, "not now")
	}
	l.streams++
	return &lateStream{Lease_LeaseKeepAliveClient: stream, of: l, first: l.streams == 1}, nil
}

// answers returns the number of answers for a lease on the first stream, and on other streams.
func (l *lateAnswers) answers(id clientv3.LeaseID) (renewed, asked int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.renewed[int64(id)], l.asked[int64(id)]
}

type lateStream struct {
	etcdserverpb.Lease_LeaseKeepAliveClient
	of    *lateAnswers
	first bool
}

func (s *lateStream) Recv() (*etcdserverpb.LeaseKeepAliveResponse, error) {
	m, err := s.Lease_LeaseKeepAliveClient.Recv()
	if err != nil {
		return nil, err
	}
	to := s.of.asked
	if s.first {
		to = s.of.renewed
		select {
		case <-s.of.release:
		case <-s.Context().Done():
			return nil, s.Context().Err()
		}
	}
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	to[m.GetID()]++
	return m, nil
}

// TestLeaseThatLivesIsKeptWhenEtcdAnswersLate: the client stops renewing a lease if the first answer takes longer than
// its connection timeout. The session must keep the lease.
func TestLeaseThatLivesIsKeptWhenEtcdAnswersLate(t *testing.T) {
	s := open(t, etcdtest.Start(t), "a")
	late := answerLate(s)
	if fresh, err := s.Join(t.Context(), prepared); err != nil || !fresh {
		t.Fatalf("join: fresh %t, %v", fresh, err)
	}
	keys, name := s.leases()
	servicetest.Eventually(t, "a question about each lease, or the end of one", func() bool {
		_, aboutKeys := late.answers(keys)
		_, aboutName := late.answers(name)
		k, n := s.leases()
		return aboutKeys > 0 && aboutName > 0 || k != keys || n != name
	})
	if k, n := s.leases(); k != keys || n != name {
		t.Fatalf("the leases are %x and %x, want %x and %x, which live", k, n, keys, name)
	}
	// It continues with both, and so once the answers come.
	close(late.release)
	servicetest.Eventually(t, "both leases are renewed", func() bool {
		ofKeys, _ := late.answers(keys)
		ofName, _ := late.answers(name)
		return ofKeys > 0 && ofName > 0
	})
	if fresh, err := s.Join(t.Context(), prepared); err != nil || fresh {
		t.Errorf("join again: fresh %t, %v", fresh, err)
	}
	if k, n := s.leases(); k != keys || n != name {
		t.Errorf("the leases are %x and %x, want %x and %x", k, n, keys, name)
	}
}

// TestLeaseThatIsGoneEndsTheSessionThoughEtcdAnswersLate: if etcd answers every renewal late, only an explicit request
// detects that the lease was revoked.
func TestLeaseThatIsGoneEndsTheSessionThoughEtcdAnswersLate(t *testing.T) {
	server := etcdtest.Start(t)
	s := open(t, server, "a")
	late := answerLate(s)
	if _, err := s.Join(t.Context(), prepared); err != nil {
		t.Fatal(err)
	}
	keys, name := s.leases()
	if _, err := server.Client().Revoke(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "the end of the session", func() bool {
		_, err := s.Lease()
		return errors.Is(err, cluster.ErrSessionLost)
	})
	if renewed, _ := late.answers(keys); renewed != 0 {
		t.Errorf("%d answers came in time, so this shows nothing", renewed)
	}
	if _, n := s.leases(); n != name {
		t.Errorf("the lease of the name is %x, want %x, which lives", n, name)
	}
}

// TestQuestionsThatFailEndNoSession: a session ends only once etcd has answered that its lease is gone, or the lease
// has run out.
func TestQuestionsThatFailEndNoSession(t *testing.T) {
	s := open(t, etcdtest.Start(t), "a")
	late := answerLate(s)
	if _, err := s.Join(t.Context(), prepared); err != nil {
		t.Fatal(err)
	}
	keys, name := s.leases()
	late.mu.Lock()
	late.refuse = 3
	late.mu.Unlock()
	servicetest.Eventually(t, "answers about both leases, or the end of one", func() bool {
		_, aboutKeys := late.answers(keys)
		_, aboutName := late.answers(name)
		k, n := s.leases()
		return aboutKeys > 0 && aboutName > 0 || k != keys || n != name
	})
	late.mu.Lock()
	left := late.refuse
	late.mu.Unlock()
	if k, n := s.leases(); k != keys || n != name || left != 0 {
		t.Fatalf("the leases are %x and %x, want %x and %x, which live; %d questions did not fail",
			k, n, keys, name, left)
	}
	close(late.release)
}

// leases returns the leases of the keys and of the name; 0 for a missing lease.
func (s *Session) leases() (keys, name clientv3.LeaseID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.keys.id, s.alive.id
}
