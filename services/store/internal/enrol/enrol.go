// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package enrol serves EnrolService over TLS: it issues credentials to other machines.
package enrol

import (
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	etcderrors "go.etcd.io/etcd/server/v3/etcdserver/errors"
	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
	"github.com/sluice-net/sluice/services/store/internal/access"
	"github.com/sluice-net/sluice/services/store/internal/accounts"
	"github.com/sluice-net/sluice/services/store/internal/authority"
	"github.com/sluice-net/sluice/services/store/internal/gateway"
	"github.com/sluice-net/sluice/services/store/internal/member"
)

// Bounds of a port that anyone may reach.
const (
	maxConnections = 256
	maxPerSource   = 16 // connections from one address
	maxMessage     = 32 << 10
	maxAge         = time.Minute // of a connection
)

// Options of a Server.
type Options struct {
	Member      *member.Member
	Access      *access.Access
	Certificate func() *tls.Certificate
	// Account returns the node of a token of the nodes' Kubernetes account; nil: no such token is accepted.
	Account    func(ctx context.Context, token string) (node string, err error)
	EnrolPort  int
	MemberPort int
	Answer     func(error) error // adds the code and the reason to the error of a call
	Log        *slog.Logger
	Now        func() time.Time
}

// Server implements EnrolService.
type Server struct {
	storev1.UnimplementedEnrolServiceServer
	o    Options
	grpc *grpc.Server
}

// New returns a Server.
func New(o Options) *Server {
	s := &Server{o: o}
	s.grpc = grpc.NewServer(
		grpc.Creds(credentials.NewTLS(&tls.Config{
			MinVersion: tls.VersionTLS13, ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: o.Member.Authority.Nodes(),
			Time: o.Now, SessionTicketsDisabled: true,
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return o.Certificate(), nil },
		})),
		grpc.ConnectionTimeout(10*time.Second), grpc.MaxRecvMsgSize(maxMessage), grpc.MaxConcurrentStreams(4),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionAge: maxAge, MaxConnectionAgeGrace: 15 * time.Second, MaxConnectionIdle: maxAge,
		}),
		grpc.UnaryInterceptor(s.around),
	)
	storev1.RegisterEnrolServiceServer(s.grpc, s)
	return s
}

// Serve serves a listener until Stop.
func (s *Server) Serve(l net.Listener) error {
	return s.grpc.Serve(netutil.LimitListener(limitPerSource(l, maxPerSource), maxConnections))
}

// Stop ends all connections.
func (s *Server) Stop() { s.grpc.Stop() }

// around limits the time of a call, and logs refusals, so that attempts with stolen tokens are visible.
func (s *Server) around(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	resp, err := handle(ctx, req)
	if err != nil {
		from := ""
		if p, ok := peer.FromContext(ctx); ok {
			from = p.Addr.String()
		}
		s.o.Log.Warn("an enrolment was refused", "method", info.FullMethod, "from", from, log.Err(err))
		return nil, s.o.Answer(err)
	}
	return resp, nil
}

// caller returns the node whose certificate the caller presented.
func (s *Server) caller(ctx context.Context) (node, enrolment string, err error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "", "", access.ErrRefused
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return "", "", access.ErrRefused
	}
	if node, enrolment, err = gateway.Node(info.State); err != nil {
		return "", "", fmt.Errorf("%w: %w", access.ErrRefused, err)
	}
	return node, enrolment, s.o.Access.Check(ctx, node, enrolment)
}

// bearer returns the node that a request is for, by the token in it or by the caller's certificate, and its enrolment.
func (s *Server) bearer(
	ctx context.Context, r *storev1.EnrolRequest, key *ecdsa.PublicKey,
) (node, enrolment string, err error) {
	switch {
	case r.GetSecret() != "":
		der, err := x509.MarshalPKIXPublicKey(key)
		if err != nil {
			return "", "", err
		}
		sum := sha256.Sum256(der)
		enrolment, err = s.o.Access.Enrol(ctx, r.GetSecret(), r.GetNode(), hex.EncodeToString(sum[:]))
		return r.GetNode(), enrolment, err
	case r.GetAccountToken() != "":
		if s.o.Account == nil {
			return "", "", fmt.Errorf("%w: this store does not ask the Kubernetes API about tokens", accounts.ErrRefused)
		}
		if node, err = s.o.Account(ctx, r.GetAccountToken()); err != nil {
			return "", "", err
		}
		enrolment, err = s.o.Access.EnrolAccount(ctx, node)
		return node, enrolment, err
	}
	return s.caller(ctx)
}

// Enrol implements the service.
func (s *Server) Enrol(ctx context.Context, r *storev1.EnrolRequest) (*storev1.EnrolResponse, error) {
	if len(r.GetSigningRequest()) > 8192 || len(r.GetSecret()) > 128 ||
		len(r.GetAccountToken()) > 16384 {
		return nil, fmt.Errorf("%w: the message is too large", authority.ErrRequest)
	}
	key, err := authority.Key(r.GetSigningRequest())
	if err != nil {
		return nil, err
	}
	node, enrolment, err := s.bearer(ctx, r, key)
	if err != nil {
		return nil, err
	}
	cert, err := s.o.Member.Authority.Sign(node, enrolment, r.GetSigningRequest())
	if err != nil {
		return nil, err
	}
	if err := s.o.Access.Renewed(ctx, node, enrolment, cert.NotAfter); err != nil {
		return nil, err
	}
	s.o.Log.Info("a node has a new certificate", "node", node, "expires", cert.NotAfter, "by_token", r.GetSecret() != "",
		"by_account", r.GetAccountToken() != "")
	return &storev1.EnrolResponse{
		Certificate: cert.Raw, ExpiryTime: timestamppb.New(cert.NotAfter), CaCertificate: s.o.Member.Authority.NodeCA(),
		Members: s.members(),
	}, nil
}

// EnrolMember implements the service.
func (s *Server) EnrolMember(
	ctx context.Context, r *storev1.EnrolMemberRequest,
) (*storev1.EnrolMemberResponse, error) {
	if at, err := netip.ParseAddrPort(r.GetPeerAddress()); err != nil || at.Addr().IsUnspecified() {
		return nil, fmt.Errorf("%w: the address %q of the member is not IP:port", member.ErrNotChanged, r.GetPeerAddress())
	}
	for _, p := range s.o.Member.Peers() {
		// Refuse this even for the same address: once the member has started, no other machine may get the keys with
		// its token.
		if p.Name == r.GetName() {
			return nil, fmt.Errorf("%w: a member called %s exists; remove it first (sluice store member remove)",
				member.ErrNotChanged, p.Name)
		}
	}
	if err := s.o.Access.EnrolMember(ctx, r.GetSecret(), r.GetName(), r.GetPeerAddress()); err != nil {
		return nil, err
	}
	cluster, err := s.o.Member.Add(ctx, r.GetPeerAddress())
	if err != nil {
		return nil, err
	}
	text, err := s.o.Member.Authority.Encode()
	if err != nil {
		return nil, err
	}
	s.o.Log.Warn("a machine became a member and has the keys of the CA", "member", r.GetName(), "address",
		r.GetPeerAddress())
	return &storev1.EnrolMemberResponse{
		Authority: text, Epoch: s.o.Member.Epoch(), ClusterToken: s.o.Member.ClusterToken(),
		InitialCluster: cluster(r.GetName()),
	}, nil
}

// ListMembers implements the service.
func (s *Server) ListMembers(ctx context.Context, _ *storev1.ListMembersRequest) (*storev1.ListMembersResponse, error) {
	if _, _, err := s.caller(ctx); err != nil {
		return nil, err
	}
	return s.members(), nil
}

func (s *Server) members() *storev1.ListMembersResponse {
	return Members(s.o.Member, s.o.EnrolPort)
}

// Members returns the addresses at which nodes reach the voting members. All members use the same ports.
func Members(m *member.Member, enrolPort int) *storev1.ListMembersResponse {
	out := &storev1.ListMembersResponse{Epoch: m.Epoch()}
	for _, p := range m.Peers() {
		at, err := netip.ParseAddrPort(p.ClientAddress)
		if err != nil || !p.Voting {
			continue
		}
		out.ClientAddresses = append(out.ClientAddresses, p.ClientAddress)
		out.EnrolAddresses = append(out.EnrolAddresses, netip.AddrPortFrom(at.Addr(), uint16(enrolPort)).String())
	}
	return out
}

// Reasons maps errors of the packages of sluice-store and of etcd to gRPC codes and to reasons of the API.
func Reasons() rpcerr.Table {
	on := rpcerr.On
	t := rpcerr.Table{
		Rows: []rpcerr.Row{
			on(access.ErrToken, codes.Unauthenticated, storev1.ErrorReason_ERROR_REASON_TOKEN_REFUSED),
			on(accounts.ErrRefused, codes.Unauthenticated, storev1.ErrorReason_ERROR_REASON_TOKEN_REFUSED),
			on(access.ErrRefused, codes.Unauthenticated, storev1.ErrorReason_ERROR_REASON_CREDENTIALS_REFUSED),
			on(access.ErrExists, codes.AlreadyExists, storev1.ErrorReason_ERROR_REASON_NODE_EXISTS),
			on(access.ErrName, codes.InvalidArgument, storev1.ErrorReason_ERROR_REASON_INVALID_NAME, rpcerr.InField("node")),
			on(authority.ErrRequest, codes.InvalidArgument, storev1.ErrorReason_ERROR_REASON_INVALID_SIGNING_REQUEST,
				rpcerr.InField("signing_request")),
			on(member.ErrNoMember, codes.NotFound, storev1.ErrorReason_ERROR_REASON_MEMBER_NOT_FOUND,
				rpcerr.OfResource("member")),
			on(member.ErrNotChanged, codes.FailedPrecondition, storev1.ErrorReason_ERROR_REASON_MEMBERS_NOT_CHANGED),
			on(etcderrors.ErrNoSpace, codes.ResourceExhausted, storev1.ErrorReason_ERROR_REASON_NO_SPACE),
		},
		Otherwise: storev1.ErrorReason_ERROR_REASON_INTERNAL,
	}
	for _, err := range []error{
		etcderrors.ErrNoLeader, etcderrors.ErrTimeout, etcderrors.ErrTimeoutDueToLeaderFail,
		etcderrors.ErrTimeoutLeaderTransfer,
		etcderrors.ErrTimeoutDueToConnectionLost, etcderrors.ErrStopped, context.DeadlineExceeded,
	} {
		t.Rows = append(t.Rows, on(err, codes.Unavailable, storev1.ErrorReason_ERROR_REASON_NO_QUORUM))
	}
	return t
}
