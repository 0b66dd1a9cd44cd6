// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// WebService is the manifest of a Service with two endpoints.
const WebService = `apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, port: 80}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
spec: {addresses: [10.244.0.2, 10.244.0.3]}
`

// loadBalancer stores services from manifests with the fields of WebService. It refuses documents with `spec:
// {refuse: why}`.
type loadBalancer struct {
	lbv1.UnimplementedLoadBalancerServiceServer

	Mu           sync.Mutex
	Revision     uint64
	Problems     []string
	Objects      map[string]string // manifests by "Service shop/web"
	Extra        []*lbv1.Service   // also listed
	Refused      []*lbv1.RefusedObject
	Notes        []string // on every service
	Sources      []*lbv1.SourceStatus
	Subscribers  []*lbv1.SubscriberStatus
	Disconnected []string
	Enforcing    []string
	WaitError    error
	Waited       *lbv1.WaitForRevisionRequest
}

func newLoadBalancer() *loadBalancer {
	return &loadBalancer{
		Revision: 6, Objects: map[string]string{}, Enforcing: []string{"datapath"},
		Sources: []*lbv1.SourceStatus{{Name: "grpc", Synced: true}},
		Subscribers: []*lbv1.SubscriberStatus{{
			Name: "datapath", Connected: true, Enforces: true, Revision: 6, EndedRevision: 6,
		}},
	}
}

// object has the fields of a manifest that this fake reads.
type object struct {
	Kind     string
	Metadata struct {
		Name, Namespace string
		Labels          map[string]string
	}
	Spec struct {
		ClusterIP       string `yaml:"clusterIP"`
		Refuse, Unknown string
		Port            uint32
		Addresses       []string
	}
}

func (o *object) text() string { return o.Kind + " " + o.Metadata.Namespace + "/" + o.Metadata.Name }

func (f *loadBalancer) UpsertServices(_ context.Context, r *lbv1.UpsertServicesRequest) (*lbv1.UpsertServicesResponse,
	error,
) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	if r.IfRevision != nil && r.GetIfRevision() != f.Revision {
		return nil, status.Error(codes.Aborted, "the revision of the services is another")
	}
	resp, bad, taken := &lbv1.UpsertServicesResponse{}, &errdetails.BadRequest{}, map[string]string{}
	wrong := func(i int, field, text string) {
		bad.FieldViolations = append(bad.FieldViolations, &errdetails.BadRequest_FieldViolation{
			Field: fmt.Sprintf("manifests[%d].spec.%s", i, field), Description: text,
		})
	}
	changed := false
	for i, text := range strings.Split(string(r.GetManifests()), "---\n")[1:] {
		var o object
		if err := yaml.Unmarshal([]byte(text), &o); err != nil {
			return nil, status.Error(codes.InvalidArgument, err.Error())
		}
		if o.Metadata.Namespace == "" {
			o.Metadata.Namespace = r.GetDefaultNamespace()
		}
		if o.Spec.Refuse != "" {
			wrong(i, "refuse", o.Spec.Refuse)
		}
		change := &lbv1.ObjectChange{
			Key:   &lbv1.ObjectKey{Kind: o.Kind, Namespace: o.Metadata.Namespace, Name: o.Metadata.Name},
			Type:  lbv1.ChangeType_CHANGE_TYPE_CREATED,
			Notes: slices.Clone(f.Notes),
		}
		if o.Spec.Unknown != "" && !r.GetAllowUnknownFields() {
			wrong(i, "unknown", "no such field")
		} else if o.Spec.Unknown != "" {
			change.DroppedFields = []string{"spec.unknown"}
		}
		if old, ok := f.Objects[o.text()]; ok && old == text {
			change.Type = lbv1.ChangeType_CHANGE_TYPE_UNCHANGED
		} else if ok {
			change.Type = lbv1.ChangeType_CHANGE_TYPE_REPLACED
		}
		changed = changed || change.GetType() != lbv1.ChangeType_CHANGE_TYPE_UNCHANGED
		resp.Changes = append(resp.Changes, change)
		taken[o.text()] = text
	}
	if len(bad.GetFieldViolations()) > 0 {
		st, err := status.New(codes.InvalidArgument, "manifests are wrong").WithDetails(bad)
		if err != nil {
			return nil, err
		}
		return nil, st.Err()
	}
	if !r.GetValidateOnly() && changed {
		f.Revision++
		for key, text := range taken {
			f.Objects[key] = text
		}
	}
	resp.Revision = f.Revision
	return resp, nil
}

func (f *loadBalancer) DeleteServices(_ context.Context, r *lbv1.DeleteServicesRequest) (*lbv1.DeleteServicesResponse,
	error,
) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	resp := &lbv1.DeleteServicesResponse{}
	for _, key := range r.GetKeys() {
		change := &lbv1.ObjectChange{Key: key, Type: lbv1.ChangeType_CHANGE_TYPE_ABSENT}
		text := key.GetKind() + " " + key.GetNamespace() + "/" + key.GetName()
		if _, ok := f.Objects[text]; ok {
			change.Type = lbv1.ChangeType_CHANGE_TYPE_DELETED
			if !r.GetValidateOnly() {
				delete(f.Objects, text)
				f.Revision++
			}
		}
		resp.Changes = append(resp.Changes, change)
	}
	resp.Revision = f.Revision
	return resp, nil
}

// services returns the services of the manifests, then Extra.
func (f *loadBalancer) services(frontends bool) (all []*lbv1.Service) {
	for _, text := range output.Ordered(f.Objects) {
		var o object
		if err := yaml.Unmarshal([]byte(text), &o); err != nil {
			panic(err) // it was parsed before
		}
		if o.Kind == "Service" {
			all = append(all, f.service(&o, frontends))
		}
	}
	return append(all, f.Extra...)
}

func (f *loadBalancer) service(o *object, frontends bool) *lbv1.Service {
	s := &lbv1.Service{
		Namespace: o.Metadata.Namespace, Name: o.Metadata.Name, Source: "grpc", Type: "ClusterIP",
		Addresses: []string{o.Spec.ClusterIP},
		Ports:     []*lbv1.ServicePort{{Name: "http", Protocol: netv1.Protocol_PROTOCOL_TCP, Port: o.Spec.Port}},
		Revision:  f.Revision, UpdateTime: timestamppb.New(time.Now().Add(-3 * time.Hour)), Notes: f.Notes, Enforced: f.WaitError == nil,
	}
	inside := &lbv1.BackendList{WhenEmpty: lbv1.EmptyAction_EMPTY_ACTION_REJECT}
	for _, text := range output.Ordered(f.Objects) {
		var slice object
		if err := yaml.Unmarshal([]byte(text), &slice); err != nil {
			panic(err)
		}
		if slice.Metadata.Labels["kubernetes.io/service-name"] != s.GetName() {
			continue
		}
		for _, a := range slice.Spec.Addresses {
			s.Ready, s.Endpoints = s.GetReady()+1, s.GetEndpoints()+1
			inside.Backends = append(inside.Backends, &lbv1.Backend{Address: a, Port: 8080})
		}
	}
	if frontends {
		s.Frontends = []*lbv1.Frontend{{
			Key:  &lbv1.FrontendKey{Address: o.Spec.ClusterIP, Port: o.Spec.Port, Protocol: netv1.Protocol_PROTOCOL_TCP},
			Kind: lbv1.FrontendKind_FRONTEND_KIND_CLUSTER_IP, Namespace: s.GetNamespace(), Name: s.GetName(), PortName: "http",
			Inside: inside,
		}}
	}
	return s
}

func (f *loadBalancer) ListServices(r *lbv1.ListServicesRequest,
	stream grpc.ServerStreamingServer[lbv1.ListServicesResponse],
) error {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	keep := func(want, have string) bool { return want == "" || want == have }
	for _, s := range f.services(r.GetWithFrontends()) {
		if !keep(r.GetNamespace(), s.GetNamespace()) || !keep(r.GetName(), s.GetName()) ||
			r.GetAddress() != "" && !slices.Contains(s.GetAddresses(), r.GetAddress()) {
			continue
		}
		m := &lbv1.ListServicesResponse{Element: &lbv1.ListServicesResponse_Service{Service: s}, Revision: f.Revision}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	for _, x := range f.Refused {
		m := &lbv1.ListServicesResponse{Element: &lbv1.ListServicesResponse_Refused{Refused: x}, Revision: f.Revision}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	return nil
}

func (f *loadBalancer) GetService(_ context.Context, r *lbv1.GetServiceRequest) (*lbv1.GetServiceResponse, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	for _, s := range f.services(true) {
		if s.GetNamespace() == r.GetNamespace() && s.GetName() == r.GetName() {
			return &lbv1.GetServiceResponse{Service: s, Revision: f.Revision}, nil
		}
	}
	return nil, status.Error(codes.NotFound, "there is no such service")
}

func (f *loadBalancer) WaitForRevision(ctx context.Context,
	r *lbv1.WaitForRevisionRequest,
) (*lbv1.WaitForRevisionResponse, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Waited = r
	if r.GetRevision() > f.Revision {
		return nil, status.Error(codes.OutOfRange, "there is no such revision yet")
	}
	if status.Code(f.WaitError) == codes.DeadlineExceeded {
		<-ctx.Done() // the kernel is slow
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	return &lbv1.WaitForRevisionResponse{
		Revision: f.Revision, Disconnected: f.Disconnected, Enforcing: f.Enforcing,
	}, f.WaitError
}

func (f *loadBalancer) GetStatus(context.Context, *lbv1.GetStatusRequest) (*lbv1.GetStatusResponse, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	all := f.services(true)
	r := &lbv1.GetStatusResponse{
		Service: serviceStatus(f.Problems...), Revision: f.Revision, Services: uint32(len(all)),
		EndpointSlices: uint32(len(f.Objects) - len(all) + len(f.Extra)), Refused: uint32(len(f.Refused)), Sources: f.Sources,
		Subscribers: f.Subscribers,
	}
	for _, s := range all {
		r.Frontends += uint32(len(s.GetFrontends()))
		r.Backends += s.GetEndpoints()
	}
	return r, nil
}
