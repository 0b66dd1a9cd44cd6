// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"context"
	"crypto/sha256"
	"encoding/pem"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
)

// Names in Kubernetes.
const (
	// ObjectName is the name of the ConfigMap with the addresses of the store, and of the Lease that decides its epoch.
	ObjectName = "sluice-store"
	// Audience is the audience of the tokens by which nodes enrol.
	Audience = "sluice-store"
	// NodeAccount is the service account of the nodes, whose tokens are accepted.
	NodeAccount = "sluice"
	// ControllerAccount is the service account of sluice-controller. The nodes on which it runs publish podCIDRs.
	ControllerAccount = "sluice-status"
)

// Published has the epoch, the addresses and the CA of a store in Kubernetes. They are in a ConfigMap, which only the
// store may write.
type Published struct {
	Epoch   uint64
	ID      string   // ID of the data of this epoch
	Clients []string // addresses of etcd, as IP:port
	Enrol   []string // addresses of EnrolService, as IP:port
	CA      string   // PEM
}

// Keys of the ConfigMap.
const (
	epochData   = "epoch"
	idData      = "id"
	clientsData = "clients"
	enrolData   = "enrol"
	caData      = "ca.crt"
)

// Data returns the data of the ConfigMap.
func (p Published) Data() map[string]string {
	return map[string]string{
		epochData: strconv.FormatUint(p.Epoch, 10), idData: p.ID, caData: p.CA,
		clientsData: strings.Join(p.Clients, ","), enrolData: strings.Join(p.Enrol, ","),
	}
}

// ParsePublished reads the data of the ConfigMap.
func ParsePublished(data map[string]string) (Published, error) {
	p := Published{ID: data[idData], CA: data[caData]}
	var err error
	if p.Epoch, err = strconv.ParseUint(data[epochData], 10, 64); err != nil || p.Epoch == 0 {
		return Published{}, fmt.Errorf("%s: %q is not a number from 1", epochData, data[epochData])
	}
	for key, to := range map[string]*[]string{clientsData: &p.Clients, enrolData: &p.Enrol} {
		*to = strings.Split(data[key], ",")
		for _, a := range *to {
			if _, err := netip.ParseAddrPort(a); err != nil {
				return Published{}, fmt.Errorf("%s: %q is not IP:port", key, a)
			}
		}
	}
	if _, err := p.hash(); err != nil {
		return Published{}, err
	}
	return p, nil
}

// hash returns the hash of the CA certificate.
func (p Published) hash() (sum [sha256.Size]byte, err error) {
	b, _ := pem.Decode([]byte(p.CA))
	if b == nil || b.Type != "CERTIFICATE" {
		return sum, fmt.Errorf("%s: no certificate in PEM", caData)
	}
	return sha256.Sum256(b.Bytes), nil
}

// Answers reports whether a member answers and serves nodes in the published epoch.
func (p Published) Answers(ctx context.Context) bool {
	hash, err := p.hash()
	if err != nil {
		return false
	}
	for _, address := range p.Enrol {
		err := callOne(ctx, address, pinned(hash, p.Epoch), func(ctx context.Context, s storev1.EnrolServiceClient) error {
			_, err := s.ListMembers(ctx, &storev1.ListMembersRequest{})
			return err
		})
		// The call has no certificate, so a member refuses it.
		if err == nil || status.Code(err) == codes.Unauthenticated {
			return true
		}
	}
	return false
}

// EnrolAccount exchanges a token of the Kubernetes account of the nodes for credentials.
func EnrolAccount(ctx context.Context, p Published, node, token string, r *Request) (Credentials, error) {
	hash, err := p.hash()
	if err != nil {
		return Credentials{}, err
	}
	var c Credentials
	err = call(ctx, p.Enrol, pinned(hash, p.Epoch), func(ctx context.Context, s storev1.EnrolServiceClient) error {
		resp, err := s.Enrol(ctx, &storev1.EnrolRequest{AccountToken: token, SigningRequest: r.signing})
		if err != nil {
			return err
		}
		c, err = r.credentials(node, resp)
		return err
	})
	return c, err
}
